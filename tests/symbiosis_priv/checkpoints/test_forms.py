"""Weights in 8 and 4 bits: every number is what its packer says, and what a stranger may write is refused."""

import contextlib
import json
import os
import shutil
import struct
import sys
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from subprocess import PIPE, run
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from safetensors.torch import load_file, save_file
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from symbiosis_priv.checkpoints.checkpoint import Checkpoint, resolve
from symbiosis_priv.checkpoints.forms import DESCRIPTIONS, READ, Form
from symbiosis_priv.checkpoints.weights import WeightStore
from symbiosis_priv.checkpoints.widening import shape, widen
from symbiosis_priv.errors import CheckpointError, UnsupportedModelError
from tests import experts, forms
from tests.cases import cases
from tests.memory import CLEAR_REFS, forget_peak, peak_kib

DOWN = "model.layers.1.mlp.down_proj"


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return experts.write("DeepseekV3", tmp_path_factory.mktemp("moe"))


@pytest.mark.parametrize("form", forms.FORMS)
def test_every_weight_is_the_packers_to_the_last_bit(form: str, llama_path: Path, tmp_path: Path) -> None:
    wide = forms.publish(llama_path, tmp_path / "published", form)
    assert resolve(tmp_path / "published") == tmp_path / "published"
    with Checkpoint(tmp_path / "published") as checkpoint, Checkpoint(wide) as expected:
        assert set(checkpoint.names()) == set(expected.names())
        for name in expected.names():
            tensor = checkpoint.tensor(name)
            assert tensor.shape == checkpoint.shape(name) == expected.shape(name)
            assert torch.equal(tensor.double(), expected.tensor(name).double()), name
            assert checkpoint.is_widened(name) == (len(checkpoint.stored(name)) > 1)


def test_the_manifest_of_experts_is_that_of_the_same_weights_in_floats(moe: Path, tmp_path: Path) -> None:
    """DeepSeek stores the experts' matrices one by one, gpt-oss in stacks."""
    gpt_oss = experts.write("GptOss", tmp_path / "gpt-oss", intermediate_size=64)
    wide = forms.publish_mxfp4(gpt_oss, tmp_path / "mxfp4")
    assert WeightStore(tmp_path / "mxfp4").manifest() == WeightStore(wide).manifest()
    for form in ("fp8 blocks, powers of two", "fp4 pairs"):
        wide = forms.publish(moe, tmp_path / form, form, chosen=r"experts\.")
        assert WeightStore(tmp_path / form).manifest() == WeightStore(wide).manifest()


@pytest.mark.skipif(not CLEAR_REFS.exists(), reason="the system has no peak of memory to reset")
def test_one_matrix_of_a_stack_is_widened_at_a_time(tmp_path: Path) -> None:
    """While a store reads and quantises 32 experts, its memory grows by less than their weights in float32."""
    stacked = ["compressed 4 bits", "mxfp4"]
    program = f"from {__name__} import growth\nfor form in {stacked}: print(*growth(form, {str(tmp_path)!r}))"
    # freed memory goes back to the system at once: what the allocator keeps would be counted too
    allocator = {"MALLOC_MMAP_THRESHOLD_": "262144", "MALLOC_ARENA_MAX": "1"}
    ran = run([sys.executable, "-c", program], env=os.environ | allocator, stdout=PIPE, check=True, timeout=240)
    for form, line in zip(stacked, ran.stdout.splitlines(), strict=True):
        weights, reading, packing = map(int, line.split())
        assert weights == 32 * 512 * 256
        assert reading < 4 * weights, form  # 2 bytes quantised, and up to 1 in the file
        assert packing < 8 * weights, form  # also packed, and mapped


def growth(form: str, path: str) -> tuple[int, int, int]:
    """The weights of a stack of 32 experts, and by how many bytes this process grows while it reads and packs it."""
    family, inner = ("GptOss", "num_local_experts") if form == "mxfp4" else ("DeepseekV3", "n_routed_experts")
    grown = []
    for experts_each in (8, 32):  # the first time, modules are imported and pools are filled
        sizes = {"hidden_size": 256, inner: experts_each, "num_hidden_layers": 1, "first_k_dense_replace": 0}
        sizes |= {"intermediate_size" if family == "GptOss" else "moe_intermediate_size": 256}
        source = experts.write(family, Path(path, f"{form} {experts_each}"), **sizes)
        published = Path(path, f"{form} {experts_each} published")
        forms.publish(source, published, form, chosen=r"\.experts\.")
        store = WeightStore(published, cache=Path(path, "cache"))
        reader = WeightStore(published, cache=Path(path, "read"))
        for work in (partial(reader.each_group, lambda *_: None), store.manifest):
            forget_peak()
            before = peak_kib()
            work()
            grown.append(1024 * (peak_kib() - before))
    return max(entry.stacked_outputs * entry.inputs for entry in store.manifest().groups), grown[2], grown[3]


# Against the computations of transformers


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e8m0fnu])
def test_fp8_is_what_transformers_makes_of_it(dtype: torch.dtype) -> None:
    found, _ = forms.floats(".weight_scale_inv", (16, 8), dtype)(48, 32, np.random.default_rng(3))
    made = widen(Form("fp8"), {"values": found[".weight"], "scales": found[".weight_scale_inv"]})
    theirs = Fp8Dequantize(None)._dequantize_one(found[".weight"], found[".weight_scale_inv"], torch.float32)
    assert torch.equal(made.float(), theirs)


def test_mxfp4_is_what_transformers_makes_of_it() -> None:
    found, _ = forms.pairs(("_blocks", "_scales"), 32)(24, 64, np.random.default_rng(4))
    blocks = found["_blocks"].view(1, 24, 2, 16)
    made = widen(Form("mxfp4"), {"values": blocks, "scales": found["_scales"][None]})
    assert torch.equal(made, convert_moe_packed_tensors(blocks, found["_scales"][None], dtype=torch.float32))


BITSANDBYTES = Path(__file__).parent / "bitsandbytes.safetensors"
"""What bitsandbytes 0.50.2 stored and made: `<case>/<tensor>` and `<case>/made`; written by `record_bitsandbytes`."""
BITSANDBYTES_CASES = {
    f"{kind} {dtype}{' nested' * nested} {block}": (kind, dtype, nested, block)
    for kind in ("nf4", "fp4")
    for dtype in ("float32", "bfloat16", "float16")
    for nested, block in ((False, 64), (True, 64), (True, 4096))
} | {"int8": ("int8", "float16", False, 0)}


def made_by_bitsandbytes(case: str) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """What the package stores of a weight, by the names in a checkpoint, and what it dequantises that to."""
    from bitsandbytes import functional  # an optional package: PEFT imports it wherever it is installed

    kind, dtype, nested, block = BITSANDBYTES_CASES[case]
    weight = torch.randn(9, 90, generator=torch.Generator().manual_seed(5)).to(getattr(torch, dtype)) / 20
    if kind == "int8":
        values, scales, _ = functional.int8_vectorwise_quant(weight)
        stored = {"up.weight": values, "up.SCB": scales, "up.weight_format": torch.tensor(0).byte()}
        return stored, functional.int8_vectorwise_dequant(values, scales)
    packed, state = functional.quantize_4bit(weight, blocksize=block, quant_type=kind, compress_statistics=nested)
    stored = {f"up.weight.{name}": part for name, part in state.as_dict(packed=True).items()}
    return stored | {"up.weight": packed}, functional.dequantize_4bit(packed, state)


def record_bitsandbytes() -> None:
    """Write `BITSANDBYTES` with the installed package."""
    found: dict[str, torch.Tensor] = {}
    for case in BITSANDBYTES_CASES:
        stored, made = made_by_bitsandbytes(case)
        found |= {f"{case}/{name}": part for name, part in (stored | {"made": made}).items()}
    save_file(found, BITSANDBYTES)


@pytest.mark.parametrize("case", BITSANDBYTES_CASES)
def test_bitsandbytes_is_what_its_package_makes_of_it(case: str, tmp_path: Path) -> None:
    """The recorded tensors; with the package, also what it makes now."""
    kind, _, nested, _ = BITSANDBYTES_CASES[case]
    recorded = {
        n.removeprefix(f"{case}/"): part for n, part in load_file(BITSANDBYTES).items() if n.startswith(case + "/")
    }
    entry = {"quant_method": "bitsandbytes", "load_in_4bit": kind != "int8", "load_in_8bit": kind == "int8"}
    if kind != "int8":
        entry |= {"bnb_4bit_quant_type": kind, "bnb_4bit_use_double_quant": nested}
    samples = [(recorded, recorded.pop("made"))]
    if find_spec("bitsandbytes"):
        samples.append(made_by_bitsandbytes(case))
    for number, (stored, expected) in enumerate(samples):
        folder = tmp_path / str(number)
        folder.mkdir()
        save_file(stored, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps({"quantization_config": entry}))
        with Checkpoint(folder) as checkpoint:
            assert checkpoint.names() == ["up.weight"]
            assert checkpoint.shape("up.weight") == expected.shape
            assert torch.equal(checkpoint.tensor("up.weight"), expected.float())


# Properties


def read(entry: dict[str, Any], found: dict[str, torch.Tensor]) -> torch.Tensor:
    """What the reader makes of the tensors of one weight, in float64."""
    form = Form.of({"quantization_config": entry})
    assert form is not None
    [parts] = form.find([f"up{ending}" for ending in found]).values()
    stored = {kind: found[name.removeprefix("up")] for kind, name in parts.items()}
    made = widen(form, stored)
    assert made.shape == shape(form, {k: part if k in DESCRIPTIONS else part.to("meta") for k, part in stored.items()})
    return made.double()


GPTQ = {"quant_method": "gptq", "dynamic": {"+:.*": {"bits": 8}}, "meta": {"quantizer": ["gptqmodel:2.2.0"]}}
NF4 = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}


@pytest.mark.parametrize("method", ["fp8", "bitsandbytes", "compressed-tensors", "gptq"])
@given(rows=st.integers(1, 40), columns=st.integers(1, 40), data=st.data(), seed=st.integers(0, 99))
def test_a_weight_of_any_size_is_read_to_the_last_bit(
    method: str, rows: int, columns: int, data: st.DataObject, seed: int
) -> None:
    """Of any edge and block, width of integers, zero points and order of columns."""
    bits, one, other = data.draw(st.sampled_from([4, 8])), data.draw(st.booleans()), data.draw(st.booleans())
    entry: dict[str, Any] = {"quant_method": method}
    if method == "fp8":
        block = data.draw(st.tuples(st.integers(1, 50), st.integers(1, 50)))
        dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float8_e8m0fnu]))
        entry["weight_block_size"], pack = [*block], forms.floats(".weight_scale_inv", block, dtype)
    elif method == "bitsandbytes":
        entry = NF4 | {"bnb_4bit_use_double_quant": one}
        kind = data.draw(st.sampled_from(["float32", "bfloat16", "float16"]))
        pack = forms.bitsandbytes("nf4", block=32, nested=one, dtype=kind)
    elif method == "compressed-tensors":
        entry |= {"format": "pack-quantized", "config_groups": {"group_0": {"weights": {"num_bits": bits}}}}
        pack, columns = forms.integers(bits, group=5, zeros=one, ordered=other), 5 * columns
    else:
        entry, pack, columns = GPTQ | {"bits": 4}, forms.gptq(bits, ordered=True), forms.GROUP * (1 + columns % 3)
    found, weight = pack(rows, columns, np.random.default_rng(seed))
    assert torch.equal(read(entry, found), weight)


@given(rows=st.integers(1, 5), bits=st.sampled_from([4, 8]), seed=st.integers(0, 999))
def test_zero_points_that_autogptq_has_lost_are_never_read_as_others(rows: int, bits: int, seed: int) -> None:
    found, weight = forms.gptq(bits, zeros="autogptq")(8 * rows, forms.GROUP, np.random.default_rng(seed))
    with contextlib.suppress(ValueError):
        assert torch.equal(read({"quant_method": "gptq", "bits": bits}, found), weight)


def test_scales_and_numbers_at_their_ends() -> None:
    """Every FP4 number under every power of two, and every FP8 number."""
    codes = torch.arange(16, dtype=torch.uint8).repeat(2)
    values = (codes[::2] | codes[1::2] << 4).expand(255, 16).contiguous()
    for method, dtype in (("mxfp4", torch.uint8), ("compressed-tensors", torch.uint8), ("fp8", torch.float8_e8m0fnu)):
        scales = torch.arange(252, dtype=torch.uint8)[:, None]  # from 2^126 on, the largest number is no float32
        stored = values[:252].view(252, 1, 16) if method == "mxfp4" else values[:252]
        made = widen(Form(method), {"values": stored, "scales": scales.view(dtype)})
        wanted = torch.tensor(forms.FP4).repeat(2).double() * 2.0 ** (scales.double() - 127)
        assert torch.equal((made.T if method == "mxfp4" else made).double(), wanted)
    with pytest.raises(ValueError, match="inf or nan"):
        widen(Form("fp8"), {"values": values[:1], "scales": torch.tensor([[255]], dtype=torch.uint8)})
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        numbers = torch.arange(256, dtype=torch.uint8).view(dtype)
        finite = numbers[numbers.float().isfinite()][None]
        for scale in (0.0, 2.0**-149, -1.5, 2.0**100):
            made = widen(Form("fp8"), {"values": finite, "scales": torch.tensor([[scale]])})
            assert torch.equal(made.double(), finite.double() * scale)


# What a stranger may write


@pytest.fixture(scope="module")
def published(llama_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, Path], Path]:
    """`published(form, folder)`: a copy of the Llama in a form, which is packed once."""
    packed: dict[str, Path] = {}

    def copy(form: str, folder: Path) -> Path:
        if form not in packed:
            packed[form] = tmp_path_factory.mktemp("packed") / "model"
            forms.publish(llama_path, packed[form], form)
        return Path(shutil.copytree(packed[form], folder))

    return copy


def damaged(folder: Path, **changes: Any) -> Path:
    """Change or remove (None) tensors of a checkpoint."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for ending, change in changes.items():
        name = f"{DOWN}.{ending}"
        tensors[name] = change(tensors.get(name))
        if tensors[name] is None:
            del tensors[name]
    save_file(tensors, path)
    return folder


def at(index: int, value: float) -> Any:
    def change(tensor: torch.Tensor) -> torch.Tensor:
        tensor.view(-1)[index] = value
        return tensor

    return change


def state(tensor: torch.Tensor, **changes: Any) -> torch.Tensor:
    """bitsandbytes' JSON in a tensor, with changes."""
    text = json.dumps(json.loads(bytes(tensor.tolist())) | changes)
    return torch.tensor(list(text.encode()), dtype=torch.uint8)


@cases(__file__, "hostile")
def test_a_damaged_weight_is_refused_by_name(
    form: str, changes: dict[str, str], says: str, published: Callable[[str, Path], Path], tmp_path: Path
) -> None:
    folder = published(form, tmp_path / "published")
    damaged(folder, **{name: eval(f"lambda t: {change}") for name, change in changes.items()})
    with pytest.raises(CheckpointError, match=says) as error:
        WeightStore(tmp_path / "published", cache=tmp_path / "cache").manifest()
    assert "down_proj" in str(error.value)


@cases(__file__, "headers")
def test_a_file_that_promises_what_it_does_not_hold_is_refused_before_it_is_read(
    tensors: dict[str, list[list[int]]], stated: int | None, tmp_path: Path
) -> None:
    """`tensors`: shape and offsets of each; `stated`: the length of the header."""
    entries = {n: {"dtype": "F8_E4M3", "shape": shape, "data_offsets": at} for n, (shape, at) in tensors.items()}
    header = json.dumps(entries).encode()
    length = struct.pack("<Q", stated or len(header))
    (tmp_path / "model.safetensors").write_bytes(length + header + bytes(8))
    with pytest.raises(CheckpointError, match=r"model\.safetensors is damaged.*fetch it again"):
        Checkpoint(tmp_path)


def test_a_folder_of_gguf_is_refused_with_its_converter(tmp_path: Path) -> None:
    (tmp_path / "model-q4.gguf").write_bytes(b"GGUF")
    with pytest.raises(CheckpointError, match=r"GGUF, which is not read.*gguf_file='model-q4\.gguf'"):
        resolve(tmp_path)


def test_tensors_of_activations_are_not_part_of_a_weight(llama_path: Path, tmp_path: Path) -> None:
    wide = forms.publish(llama_path, tmp_path / "published", "compressed fp8")
    damaged(tmp_path / "published", input_scale=lambda _: torch.ones(1), weight_bits=lambda _: torch.ones(1))
    store = WeightStore(tmp_path / "published")
    assert store.is_complete()
    assert store.manifest() == WeightStore(wide).manifest()


@cases(__file__, "refused")
def test_other_forms_are_refused_by_name_with_what_to_do(
    entry: Any, says: str, llama_path: Path, tmp_path: Path
) -> None:
    config = json.loads((llama_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": entry}))
    with pytest.raises((CheckpointError, UnsupportedModelError), match=says) as error:
        resolve(tmp_path)
    assert str(tmp_path) in str(error.value)
    assert len(str(error.value)) < 800


_ENTRIES = (
    *("quant_method", "bits", "w_bit", "version", "format", "checkpoint_format", "weight_block_size", "config_groups"),
    *("weights", "num_bits", "block_structure", "sparsity_config", "transform_config", "group_0", "group_size"),
    *("q_group_size", "sym", "symmetric", "zero_point", "dynamic", "meta", "quantizer"),
)


@given(
    entry=st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.sampled_from(READ),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(_ENTRIES), inner, max_size=6),
    )
)
def test_any_entry_is_read_or_refused(entry: Any) -> None:
    try:
        form = Form.of({"quantization_config": entry})
    except (CheckpointError, UnsupportedModelError):
        return
    assert form is None or form.method in READ
