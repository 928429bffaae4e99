"""Makes the numbers of a weight that bitsandbytes has stored in 4 bits (NF4, FP4) or in int8, as bitsandbytes does.

Unlike other forms (`widening`), this one rounds: bitsandbytes multiplies in float32, and rounds a 4-bit weight to the
dtype of the weight that was quantised. The same roundings are made here, so every bit is that of its `dequantize_4bit`
or `int8_vectorwise_dequant`. A block's scale may be quantised itself (nested): a code of 256 numbers, a scale for some
blocks, and an offset for all.
"""

from typing import Literal

import msgspec
import torch
from torch import Tensor

from symbiosis_priv.arithmetic.passes import large_tensor
from symbiosis_priv.checkpoints.forms import Form

# QLoRA (arXiv 2305.14314), appendix E; the last bits are those of the tables that bitsandbytes stores
_NF4 = (-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
        -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634,
        0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0)  # fmt: skip
# FP4 has no order, and its upper bit is the sign
_FP4 = [sign * number / 12 for sign in (1, -1) for number in (0.0, 0.0625, 8.0, 12.0, 4.0, 6.0, 2.0, 3.0)]
_BLOCKS = (32, 64, 128, 256, 512, 1024, 2048, 4096)
_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
_MAX_STATE = 4096
_AT_ONCE = 1 << 20  # numbers that are widened at the same time; whole blocks, and whole bytes
_OF_127 = 7.874015718698502e-3  # bitsandbytes multiplies by this number instead of dividing by 127


class _State(msgspec.Struct):
    """The used part of the JSON that bitsandbytes stores in a tensor beside the weight."""

    quant_type: Literal["nf4", "fp4"]
    blocksize: int
    dtype: Literal["float16", "bfloat16", "float32"]
    shape: tuple[int, int]
    nested_blocksize: int | None = None
    nested_dtype: Literal["float32"] | None = None
    nested_offset: float | None = None


def shape(form: Form, parts: dict[str, Tensor]) -> tuple[int, ...]:
    """The shape of a weight. The tensors may be on the meta device, but for the state. Raises what `widen` raises."""
    return _state(form, parts).shape if "code" in parts else tuple(parts["values"].shape)


def widen(form: Form, parts: dict[str, Tensor]) -> Tensor:
    """A weight in float32. Raises `ValueError`: the tensors contradict each other or config.json, or the weight holds
    inf or nan."""
    weight = _four_bits(form, parts) if "code" in parts else _int8(form, parts)
    if not all(edge.isfinite() for edge in weight.aminmax()):
        raise ValueError("it holds inf or nan")
    return weight


def _int8(form: Form, parts: dict[str, Tensor]) -> Tensor:
    values, scales = parts["values"], parts["scales"]
    if 8 not in form.bits:
        raise ValueError("config.json says 4 bits, and it is stored in 8")
    if values.dtype != torch.int8 or values.ndim != 2 or scales.dtype != torch.float32:
        raise ValueError(f"weights of {values.dtype} with scales of {scales.dtype} are not read")
    if scales.shape != (len(values),):
        raise ValueError(f"{list(scales.shape)} scales do not fit {list(values.shape)} numbers")
    if "order" in parts and (parts["order"].numel() != 1 or int(parts["order"])):
        raise ValueError("its numbers are not stored by rows; save it again with a newer bitsandbytes")
    weight = large_tensor(tuple(values.shape), dtype=torch.float32)
    return torch.mul(values, scales[:, None], out=weight).mul_(_OF_127)


def _four_bits(form: Form, parts: dict[str, Tensor]) -> Tensor:
    state = _state(form, parts)
    rows, columns = state.shape
    code = torch.tensor(_NF4 if state.quant_type == "nf4" else _FP4, dtype=torch.float32, device="cpu")
    if not torch.equal(parts["code"], code):
        raise ValueError(f"its table of numbers is not that of {state.quant_type}")
    stored, scales = parts["values"].flatten().view(torch.uint8), _scales(state, parts)
    weight = large_tensor((rows, columns), dtype=torch.float32)
    numbers = weight.view(-1)
    for start in range(0, len(numbers), _AT_ONCE):
        out = numbers[start : start + _AT_ONCE]
        pairs = stored[start // 2 : (start + len(out) + 1) // 2]
        codes = torch.stack([pairs >> 4, pairs & 15], dim=-1).flatten()[: len(out)]
        blocks = scales[start // state.blocksize :].repeat_interleave(state.blocksize)[: len(out)]
        out.copy_((code[codes.int()] * blocks).to(_DTYPES[state.dtype]))
    return weight


def _state(form: Form, parts: dict[str, Tensor]) -> _State:
    """The state of a weight in 4 bits, after it was compared with its name, config.json and the sizes of the parts."""
    found = [kind for kind in ("nf4", "fp4") if kind in parts]
    if len(found) != 1:
        raise ValueError("it has no state, or two (quant_state.bitsandbytes__nf4, ...fp4)")
    raw = parts[found[0]]
    if raw.dtype != torch.uint8 or raw.ndim != 1 or raw.numel() > _MAX_STATE:
        raise ValueError(f"its state is not at most {_MAX_STATE} bytes of JSON")
    try:
        state = msgspec.json.decode(bytes(raw.tolist()), type=_State)
    except msgspec.MsgspecError as error:
        raise ValueError(f"its state is damaged: {error}") from error
    if state.quant_type != found[0] or (form.code and form.code != found[0]) or 4 not in form.bits:
        raise ValueError(f"config.json says {form.code or '8 bits'}, the state {state.quant_type} as {found[0]}")
    nested = "nested_scales" in parts
    if form.nested != nested:
        raise ValueError("config.json and its tensors disagree about quantised scales (bnb_4bit_use_double_quant)")
    count = state.shape[0] * state.shape[1]
    values, blocks = parts["values"], 0
    if min(state.shape) > 0 and state.blocksize in _BLOCKS and not values.dtype.is_complex:
        blocks = -(-count // state.blocksize)
    if not blocks or values.numel() * values.element_size() != -(-count // 2) or parts["scales"].shape != (blocks,):
        raise ValueError(
            f"{list(values.shape)} numbers with {list(parts['scales'].shape)} scales are not {list(state.shape)} in "
            f"blocks of {state.blocksize}"
        )
    return state


def _scales(state: _State, parts: dict[str, Tensor]) -> Tensor:
    """A scale for each block, float32."""
    scales = parts["scales"]
    if "nested_scales" not in parts:
        if scales.dtype != torch.float32:
            raise ValueError(f"scales of {scales.dtype} are not read")
        return scales
    code, outer = parts.get("nested_code"), parts["nested_scales"]
    if (
        scales.dtype != torch.uint8
        or code is None
        or (code.dtype, code.shape) != (torch.float32, (256,))
        or state.nested_blocksize not in _BLOCKS
        or state.nested_offset is None
        or state.nested_dtype is None
        or (outer.dtype, outer.shape) != (torch.float32, (-(-len(scales) // state.nested_blocksize),))
    ):
        raise ValueError("its quantised scales lack a part, or the parts do not fit together")
    made = code[scales.int()] * outer.repeat_interleave(state.nested_blocksize)[: len(scales)]
    return made + torch.tensor(state.nested_offset, dtype=torch.float32, device="cpu")
