"""The forms in which published checkpoints store weights in 8 or 4 bits: which tensors make a weight, by their names.

config.json states the form (`quantization_config`), and another party wrote it: it is read as data, and no other
library's quantizer runs. A form that is not read is refused by its name. `widening` makes the numbers.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from symbiosis_priv.errors import CheckpointError, UnsupportedModelError, one_line

Parts = dict[str, str]
"""The stored tensors of a weight, by kind: `values`, `scales`, and some of `zeros`, `groups` (of columns), `shape`, and
for all scales a `factor` or a `divisor`. Those of bitsandbytes are in `_OF_BITSANDBYTES`."""

DESCRIPTIONS = ("shape", "nf4", "fp4")
"""The kinds whose tensors say what a weight is, and hold none of its numbers."""

_MAX_BLOCK = 1 << 20
_BITS = (4, 8)
_COMPRESSED = (
    *(None, "dense", "naive-quantized", "float-quantized", "int-quantized", "pack-quantized", "mixed-precision"),
    *("mxfp8-quantized", "mxfp4-pack-quantized", "nvfp4-pack-quantized"),
)
_MODELOPT = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "MXFP8", "NVFP4", "W4A16_NVFP4")


@dataclass(frozen=True)
class _Layout:
    """The endings of the tensors' names, and of the weight's own name in the same place."""

    weight: str
    values: str
    scales: str
    optional: Mapping[str, str] = field(default_factory=dict)
    needed: Mapping[str, str] = field(default_factory=dict)

    @property
    def anchor(self) -> str:
        """The ending by which a weight is found."""
        return self.scales if self.values == self.weight else self.values


def _scaled(scales: str, weight: str = "", **optional: str) -> _Layout:
    return _Layout(weight, weight, scales, optional)


_OF_PACKED = {"zeros": "_zero_point", "groups": "_g_idx", "shape": "_shape", "divisor": "_global_scale"}
_FLOATS = (_scaled("_scale_inv"), _scaled("_scale"), _scaled(".scale", ".weight"), _scaled(".qscale_weight", ".weight"))
_OF_BITSANDBYTES = {"nested_scales": ".nested_absmax", "nested_code": ".nested_quant_map"} | {
    kind: f".quant_state.bitsandbytes__{kind}" for kind in ("nf4", "fp4")
}
_LAYOUTS: dict[str, tuple[_Layout, ...]] = {
    "fp8": _FLOATS,
    "mxfp8": _FLOATS,
    "fbgemm_fp8": _FLOATS,
    "mxfp4": (_Layout("", "_blocks", "_scales"),),
    "modelopt": (_scaled("_scale", factor="_scale_2"),),
    "compressed-tensors": (_Layout("", "_packed", "_scale", _OF_PACKED), _scaled("_scale", zeros="_zero_point")),
    "gptq": (_Layout(".weight", ".qweight", ".scales", {"groups": ".g_idx"}, {"zeros": ".qzeros"}),),
    "awq": (_Layout(".weight", ".qweight", ".scales", needed={"zeros": ".qzeros"}),),
    "bitsandbytes": (
        _Layout("", "", ".absmax", _OF_BITSANDBYTES, {"code": ".quant_map"}),
        _Layout(".weight", ".weight", ".SCB", {"order": ".weight_format"}),
    ),
}
READ = tuple(_LAYOUTS)
"""The quantisation methods that are read, as config.json names them."""

_ORIGINAL = "use the unquantised model that it was made from"
_FIXES = {
    "higgs": "convert it where its library runs: model = AutoModelForCausalLM.from_pretrained(path), "
    "model.dequantize(), model.save_pretrained(new)",
    "gguf": "convert it: AutoModelForCausalLM.from_pretrained(path, gguf_file=name).save_pretrained(new)",
    "auto-round": "export it in another format: AutoRound(...).quantize_and_save(new, format='auto_gptq')",
}


@dataclass(frozen=True)
class Form:
    """How a checkpoint stores its weights."""

    method: str  # one of `READ`
    bits: tuple[int, ...] = _BITS  # that an integer may have
    # rows and columns of a weight that share a scale, where config.json states them; otherwise the shapes say it
    block: tuple[int, int] | None = None
    groups: tuple[int, ...] = ()  # columns that share a scale, if config.json states them
    symmetric: bool = False  # config.json says that every zero point is the middle
    plus_one: bool = False  # stored zero points are one too small (GPTQ's first format)
    code: str = ""  # the numbers that 4 bits of bitsandbytes stand for, if config.json names them: nf4 or fp4
    nested: bool = False  # bitsandbytes has quantised the scales, too
    whole_words: bool = False  # the packer took that one from whole words, so that fields borrow from their neighbours

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> "Form | None":
        """The form that a config.json states; None if it states none. Raises `UnsupportedModelError`: the form is not
        read; `CheckpointError`: the entry is damaged."""
        entry = stated(config)
        if not entry:
            return None
        method = entry.get("quant_method") if isinstance(entry, dict) else entry
        if not isinstance(entry, dict) or method not in READ:
            raise _refused(method)
        if method == "compressed-tensors":
            return cls._compressed(entry)
        if method == "modelopt" and (algorithm := entry.get("quant_algo")) not in _MODELOPT:
            raise _refused(f"modelopt with {algorithm}")
        if method == "gptq":
            kind = entry.get("checkpoint_format") or entry.get("format") or "gptq"
            if kind not in ("gptq", "gptq_v2") or entry.get("is_marlin_format"):
                raise _refused(f"gptq in the format {kind if kind != 'gptq' else 'marlin'}")
            return cls._gptq(entry, plus_one=kind == "gptq")
        if method == "awq":
            kind = str(entry.get("version") or entry.get("format") or "gemm").lower()
            if kind != "gemm" or _number(entry, "bits" if "bits" in entry else "w_bit") != 4:
                raise _refused(f"awq in the version {kind}, or not in 4 bits")
            groups = _groups([entry], "group_size" if "group_size" in entry else "q_group_size")
            return cls(method, (4,), groups=groups, symmetric=entry.get("zero_point") is False)
        if method == "bitsandbytes":
            return cls._bitsandbytes(entry)
        return cls(method, block=_block(entry.get("weight_block_size")))

    @classmethod
    def _bitsandbytes(cls, entry: dict[str, Any]) -> "Form":
        four, eight = (entry.get(key, False) for key in ("load_in_4bit", "load_in_8bit"))
        code, nested = entry.get("bnb_4bit_quant_type", "fp4"), entry.get("bnb_4bit_use_double_quant", False)
        if {four, eight} != {True, False} or type(nested) is not bool or code not in ("nf4", "fp4"):
            raise _refused(
                f"bitsandbytes with load_in_4bit = {four}, load_in_8bit = {eight}, {code}, nested = {nested}"
            )
        return cls("bitsandbytes", (4,) if four else (8,), code=code if four else "", nested=four and nested)

    @classmethod
    def _gptq(cls, entry: dict[str, Any], *, plus_one: bool) -> "Form":
        dynamic, meta = entry.get("dynamic"), entry.get("meta")
        # of modules by pattern; `-:` and False exclude modules, which are stored as they are used
        changes = (
            [change for change in dynamic.values() if isinstance(change, dict)] if isinstance(dynamic, dict) else []
        )
        stated = [entry, *({**entry, **change} for change in changes)]
        return cls(
            "gptq",
            tuple(sorted({_number(each, "bits") for each in stated})),
            groups=_groups(stated, "group_size"),
            symmetric=all(each.get("sym") is True for each in stated),
            plus_one=plus_one,
            whole_words="gptqmodel:" in str(meta.get("quantizer") if isinstance(meta, dict) else ""),
        )

    @classmethod
    def _compressed(cls, entry: dict[str, Any]) -> "Form":
        kinds = [entry.get("format")]
        bits, blocks, stated = set(), set(), []
        groups = entry.get("config_groups")
        for group in groups.values() if isinstance(groups, dict) else ():
            weights = group.get("weights") if isinstance(group, dict) else None
            if not isinstance(weights, dict):
                continue
            kinds.append(group.get("format"))
            bits.add(_number(weights, "num_bits"))
            stated.append(weights)
            if weights.get("block_structure") is not None:
                blocks.add(_block(weights["block_structure"]))
        if other := [kind for kind in kinds if kind not in _COMPRESSED]:
            raise _refused(f"compressed-tensors in the format {other[0]}")
        sparsity = entry.get("sparsity_config")
        if isinstance(sparsity, dict) and sparsity.get("format", "dense") != "dense":
            raise _refused(f"compressed-tensors in the format {sparsity['format']}")
        if entry.get("transform_config"):
            raise _refused("compressed-tensors with rotated weights (transform_config)")
        if len(blocks) > 1:
            raise _refused("compressed-tensors with blocks of several sizes")
        return cls(
            "compressed-tensors",
            tuple(sorted(bits)) or _BITS,
            next(iter(blocks), None),
            _groups(stated, "group_size"),
            symmetric=bool(stated) and all(weights.get("symmetric") is True for weights in stated),
        )

    @property
    def transposed(self) -> bool:
        """True if the weight is the transposed matrix of what is stored: gpt-oss multiplies rows by `[in, out]`."""
        return self.method == "mxfp4"

    def find(self, stored: Collection[str]) -> dict[str, Parts]:
        """The weights among the tensors of a checkpoint, and their parts. Other tensors are no part of a weight: they
        are stored as they are used, or belong to the quantisation of activations. Raises `CheckpointError`: a weight
        lacks a part, or is stored twice."""
        found: dict[str, Parts] = {}
        taken: set[str] = set()
        for layout in _LAYOUTS[self.method]:
            required = {"values": layout.values, "scales": layout.scales, **layout.needed}
            for name in stored:
                if not name.endswith(layout.anchor) or name in taken:
                    continue
                stem = name.removesuffix(layout.anchor)
                weight = stem + layout.weight
                if layout.values == layout.weight and weight not in stored:
                    continue  # a parameter whose own name ends like this
                if missing := [stem + ending for ending in required.values() if stem + ending not in stored]:
                    raise CheckpointError(f"the checkpoint has no {missing[0]}, and {name} needs it; fetch it again")
                if weight in found or (weight in stored and layout.values != layout.weight):
                    raise CheckpointError(f"the checkpoint stores {weight} twice; fetch it again")
                extra = {kind: stem + ending for kind, ending in layout.optional.items() if stem + ending in stored}
                found[weight] = {kind: stem + ending for kind, ending in required.items()} | extra
                taken.update(found[weight].values())
        return found


def stated(config: Mapping[str, Any]) -> Any:
    """The entry of a config.json that says how weights are stored, where transformers looks for it: in the whole
    model's configuration, or in its text model's."""
    text = config.get("text_config")
    return config.get("quantization_config") or (text.get("quantization_config") if isinstance(text, dict) else None)


def _refused(method: object) -> UnsupportedModelError:
    name = one_line(str(method))[:80]
    return UnsupportedModelError(
        f"the weights are quantised already ({name}), and that form is not read; {_FIXES.get(name, _ORIGINAL)} "
        f"(read are {', '.join(READ)}, and float32, bfloat16 and float16)"
    )


def _number(entry: Mapping[str, Any], key: str) -> int:
    value = entry.get(key)
    if type(value) is not int or value not in _BITS:
        raise _refused(f"{key} = {value!r}; read are 4 and 8")
    return value


def _groups(entries: Iterable[Mapping[str, Any]], key: str) -> tuple[int, ...]:
    """The sizes of groups of columns, in any order. None and -1 are all columns."""
    sizes = [size for entry in entries if (size := entry.get(key)) not in (None, -1)]
    if other := [size for size in sizes if type(size) is not int or not 0 < size <= _MAX_BLOCK]:
        raise _refused(f"{key} = {other[0]!r}")
    return tuple(sorted(set(sizes)))


def _block(value: Any) -> tuple[int, int] | None:
    if value is None:
        return None
    if not isinstance(value, list) or len(value) != 2 or not all(type(n) is int and 0 < n <= _MAX_BLOCK for n in value):
        raise CheckpointError(f"config.json states blocks of {one_line(str(value))[:80]}; write two positive numbers")
    return value[0], value[1]
