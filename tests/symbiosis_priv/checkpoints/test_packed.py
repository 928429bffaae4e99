"""Packed weights on disk: mapped at later starts, and never used if damaged."""

import logging
import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings, strategies as st
from hypothesis.strategies import DataObject
from safetensors.torch import load_file
from torch import Tensor

from symbiosis_priv.arithmetic.ring import DIRECTIONS, Direction
from symbiosis_priv.checkpoints import packed, weights
from symbiosis_priv.checkpoints.weights import WeightStore
from symbiosis_priv.kernels import KERNELS, RingMatrix, choose
from tests import drawn
from tests.builds import only

CPU = torch.device("cpu")
LAYOUTS = {kernel.layout: kernel for kernel in KERNELS.values() if kernel.supports(CPU)}


def rows(width: int) -> Tensor:
    return torch.arange(2 * width, dtype=torch.int32).reshape(2, width) * 0x01234567 - 5


def expected(store: WeightStore, index: int, direction: Direction) -> Tensor:
    weight = store.group(index).weight.to(torch.int64)
    matrix = weight.t() if direction == "forward" else weight
    return (rows(matrix.shape[0]).to(torch.int64) @ matrix).to(torch.int32)


def served(store: WeightStore, index: int, direction: Direction) -> Tensor:
    matrix = store.matrix(index)
    return matrix.product(rows(matrix.columns(direction)[0]), direction)


def file_of(cache: Path, digest: str) -> Path:
    [file] = cache.rglob(f"{digest}-*.safetensors")
    return file


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.mark.parametrize("kernel", ["auto", *(n for n, k in KERNELS.items() if k.supports(CPU))])
def test_mapped_weights_equal_the_packed_ones(kernel: str, llama_path: Path, cache: Path) -> None:
    with only(kernel):
        WeightStore(llama_path, cache=cache).manifest()
        store = WeightStore(llama_path, cache=cache)
        for index in range(len(store.manifest().groups)):
            for direction in DIRECTIONS:
                assert torch.equal(served(store, index, direction), expected(store, index, direction))


def test_the_second_start_only_maps(llama_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entries = WeightStore(llama_path, cache=cache).manifest().groups
    monkeypatch.setattr(weights, "quantise", lambda *_, **__: pytest.fail("quantised again"))
    monkeypatch.setattr(WeightStore, "_pack", lambda *_: pytest.fail("packed again"))
    store = WeightStore(llama_path, cache=cache)
    matrices = [store.matrix(index) for index in range(len(entries))]
    mapped = Path("/proc/self/maps")
    if mapped.is_file():
        text = mapped.read_text("utf-8")
        assert all(str(file_of(cache, entry.digest)) in text for entry in entries)
    assert len(list(cache.rglob("*.safetensors"))) == len(entries)  # nothing else is stored
    del matrices


def test_a_cache_that_others_can_change_is_warned_about(
    llama_path: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "weights"
    for mode, said in ((None, False), (0o755, False), (0o775, True), (0o777, True)):
        if mode is not None:
            folder.mkdir(exist_ok=True)
            folder.chmod(mode)
        caplog.clear()
        WeightStore(llama_path, cache=tmp_path)
        assert ("others can change the weights" in caplog.text) == said


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", [(1, 1), (3, 70), (65, 33)])
@pytest.mark.parametrize("weight_bits", [8, 10])
def test_files_are_safetensors_and_aligned(
    layout: str, shape: tuple[int, int], weight_bits: int, tmp_path: Path
) -> None:
    weight = torch.arange(shape[0] * shape[1], dtype=torch.int16).reshape(shape) % 127 - 63
    kernel = LAYOUTS[layout]
    made = kernel.pack(weight, weight_bits=weight_bits)
    products = packed.probe_products(weight, weight_bits=weight_bits)
    packed.write(tmp_path, "d", made, products)
    found = packed.read(tmp_path, "d", kernel, weight_bits=weight_bits)
    assert found is not None
    assert torch.equal(found[0].data, made.data)
    assert found[0].data.data_ptr() % 64 == 0
    assert all(torch.equal(found[1][direction], products[direction]) for direction in DIRECTIONS)
    assert torch.equal(load_file(packed.path_of(tmp_path, "d", layout))["weight"], made.data)
    assert packed.read(tmp_path, "d", kernel, weight_bits=weight_bits + 1) is None
    assert packed.read(tmp_path, "another", kernel, weight_bits=weight_bits) is None


@settings(max_examples=25)
@given(data=st.data(), bits=drawn.weight_bits())
def test_one_altered_weight_is_always_detected(data: DataObject, bits: int) -> None:
    outputs, inputs = data.draw(drawn.widths()), data.draw(drawn.widths())
    weight = data.draw(drawn.integer_weights(outputs=outputs, inputs=inputs, bits=bits))
    products = packed.probe_products(weight, weight_bits=bits)
    assert packed.agrees(RingMatrix(weight, weight_bits=bits), products)
    altered = weight.clone().view(-1)
    place = data.draw(st.integers(0, len(altered) - 1))
    top = 2 ** (bits - 1) - 1
    altered[place] = data.draw(st.integers(-top, top).filter(lambda value: value != int(altered[place])))
    assert not packed.agrees(RingMatrix(altered.view(weight.shape), weight_bits=bits), products)


@settings(max_examples=25)
@given(data=st.data())
def test_a_damaged_file_is_noticed_and_made_again(
    data: DataObject, gpt2_path: Path, gpt2_cache: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    cache = Path(shutil.copytree(gpt2_cache, tmp_path_factory.mktemp("copy") / "cache"))
    store = WeightStore(gpt2_path, cache=cache)
    entry = store.manifest().groups[0]
    file = file_of(cache, entry.digest)
    whole = file.read_bytes()
    content = bytearray(whole)
    if data.draw(st.booleans()):
        position = data.draw(st.integers(0, 900) | st.integers(0, len(content) - 1)) % len(content)
        content[position] ^= 1 << data.draw(st.integers(0, 7))
    else:
        content = content[: data.draw(st.integers(0, len(content) - 1))]
    file.unlink()
    file.write_bytes(content)
    later = WeightStore(gpt2_path, cache=cache)
    for direction in DIRECTIONS:
        assert torch.equal(served(later, 0, direction), expected(store, 0, direction))


def test_damage_is_logged_and_repaired(llama_path: Path, cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = WeightStore(llama_path, cache=cache)
    entry = store.manifest().groups[1]
    file = file_of(cache, entry.digest)
    whole = file.read_bytes()
    damaged = bytearray(whole)
    damaged[-store.matrix(1).nbytes] ^= 4  # the first weight: others may be padding
    file.write_bytes(damaged)
    with caplog.at_level(logging.WARNING, logger="symbiosis_priv.checkpoints.weights"):
        assert torch.equal(served(WeightStore(llama_path, cache=cache), 1, "forward"), expected(store, 1, "forward"))
    assert "damaged" in caplog.text
    assert entry.name in caplog.text
    assert file.read_bytes() == whole


def test_another_groups_file_is_not_used(llama_path: Path, cache: Path) -> None:
    store = WeightStore(llama_path, cache=cache)
    victim, other = (file_of(cache, entry.digest) for entry in (store.manifest().groups[0], store.manifest().groups[4]))
    assert store.manifest().groups[0].inputs == store.manifest().groups[4].inputs
    other.replace(victim)
    assert torch.equal(served(store, 0, "forward"), expected(store, 0, "forward"))


def test_a_kernel_of_another_layout_has_its_own_packed_weights(llama_path: Path, cache: Path) -> None:
    store = WeightStore(llama_path, cache=cache)
    entry = store.manifest().groups[0]
    default = choose(weight_bits=10, device=CPU).few.layout
    with only("plain" if default != "plain" else "native-portable"):
        assert torch.equal(served(WeightStore(llama_path, cache=cache), 0, "forward"), expected(store, 0, "forward"))
    assert len(list(cache.rglob(f"{entry.digest}-*.safetensors"))) == 2
