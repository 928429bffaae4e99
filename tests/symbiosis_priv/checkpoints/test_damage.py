"""Damaged and hostile checkpoints: every fault is an error of the tree, without a long wait."""

import contextlib
import json
import re
import shutil
import struct
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from symbiosis_priv.checkpoints.checkpoint import resolve
from symbiosis_priv.checkpoints.discovery.skeleton import discover
from symbiosis_priv.checkpoints.weights import WeightStore
from symbiosis_priv.errors import CheckpointError, SymbiosisError
from tests.cases import cases

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
JUNK: st.SearchStrategy[Any] = st.sampled_from(
    [
        *(None, True, -1, 0, 1, 1.5, 2**31, 10**30, float("nan")),
        *("", "x", "../x", "/etc/passwd", "a\x00b", "LlamaModel", "bfloat16"),
        *([], {}, [1], ["x"], [[]], [None], {"a": 1}, {"": {}}, {"model_type": "bert"}),
    ]
)


@st.composite
def damaged(draw: st.DrawFn, content: dict[str, Any]) -> dict[str, Any]:
    """A JSON object with one or two entries, at any depth, replaced or removed."""
    changed: dict[str, Any] = json.loads(json.dumps(content))
    for _ in range(draw(st.integers(1, 2))):
        place: Any = changed
        while True:
            keys = list(place) if isinstance(place, dict) else list(range(len(place)))
            if not keys:
                break
            key = draw(st.sampled_from(keys))
            if isinstance(place[key], dict | list) and place[key] and draw(st.booleans()):
                place = place[key]
                continue
            if isinstance(place, dict) and draw(st.integers(0, 4)) == 0:
                del place[key]
            else:
                place[key] = deepcopy(draw(JUNK))  # the next entry may be inside it
            break
    return changed


def header(path: Path) -> tuple[dict[str, Any], bytes]:
    """The header of a safetensors file, and the bytes after it."""
    whole = path.read_bytes()
    (size,) = struct.unpack("<Q", whole[:8])
    return json.loads(whole[8 : 8 + size]), whole[8 + size :]


def survives(folder: Path) -> None:
    """Check that every reader accepts the folder, or refuses it with an error of the tree."""
    ways: list[Callable[[], object]] = [
        lambda: resolve(folder),
        lambda: discover(folder),
        lambda: WeightStore(folder, cache=folder / "cache").is_complete(),
        lambda: WeightStore(folder, cache=folder / "cache").manifest(),
    ]
    for way in ways:
        with contextlib.suppress(SymbiosisError):
            way()


@pytest.fixture(scope="module")
def copies(tmp_path_factory: pytest.TempPathFactory, llama: PreTrainedModel, gpt2_path: Path) -> Callable[[str], Path]:
    """`copies("llama")`, in shards, or `copies("gpt2")`: always the same folder, restored before each use."""
    sharded, folder = tmp_path_factory.mktemp("sharded"), tmp_path_factory.mktemp("damaged")
    llama.save_pretrained(sharded, max_shard_size="20KB")

    def copy(name: str) -> Path:
        shutil.rmtree(folder)
        return Path(shutil.copytree(sharded if name == "llama" else gpt2_path, folder))

    return copy


@given(st.data(), st.sampled_from([("llama", "config.json"), ("gpt2", "config.json"), ("llama", INDEX)]))
@settings(max_examples=settings().max_examples * 3 // 4)
def test_config_json_and_the_index(copies: Callable[[str], Path], data: st.DataObject, place: tuple[str, str]) -> None:
    folder = copies(place[0])
    path = folder / place[1]
    path.write_text(json.dumps(data.draw(damaged(json.loads(path.read_bytes())))))
    survives(folder)


@given(st.data())
@settings(max_examples=settings().max_examples // 4)
def test_headers_of_tensors(copies: Callable[[str], Path], data: st.DataObject) -> None:
    folder = copies("gpt2")
    entries, tensors = header(folder / SINGLE)
    changed = json.dumps(data.draw(damaged(entries))).encode()
    (folder / SINGLE).write_bytes(struct.pack("<Q", len(changed)) + changed + tensors)
    survives(folder)


@pytest.mark.parametrize("name", ["config.json", INDEX])
@pytest.mark.parametrize(
    "content", ['{"weight_map": ' + "[" * 100_000, "[" * 100_000 + "]" * 100_000, '{"a": "\\ud800"}', "{}"]
)
def test_nesting_and_encodings(copies: Callable[[str], Path], name: str, content: str) -> None:
    folder = copies("llama")
    (folder / name).write_text(content)
    with pytest.raises(SymbiosisError):
        WeightStore(folder, cache=folder / "cache").manifest()
    survives(folder)


@cases(__file__, "parameters")
def test_weights_of_other_shapes_and_dtypes_are_named(copies: Callable[[str], Path], tensor: str, change: str) -> None:
    folder = copies("gpt2")
    tensors = load_file(folder / SINGLE)
    name = next(n for n in tensors if n.endswith(f"h.1.{tensor}"))
    changed = eval(f"lambda t: {change}", {"torch": torch})(tensors.pop(name))
    save_file(
        tensors if changed is None else tensors | {name: changed.contiguous()},
        folder / SINGLE,
        metadata={"format": "pt"},
    )
    with pytest.raises(CheckpointError, match=r"h\.1\." + ("" if changed is not None else re.escape(tensor))):
        WeightStore(folder, cache=folder / "cache").manifest()


@cases(__file__, "sizes")
def test_sizes_beyond_the_limits_are_refused(copies: Callable[[str], Path], key: str, value: Any) -> None:
    folder = copies("llama")
    config = json.loads((folder / "config.json").read_bytes())
    (folder / "config.json").write_text(json.dumps(config | {key: value}))
    with pytest.raises(CheckpointError, match=f"says {key} = "):
        discover(folder)


def test_one_weight_under_two_names_is_refused(copies: Callable[[str], Path]) -> None:
    """transformers adds and removes prefixes, so it would be unclear which of the two it loads."""
    folder = copies("gpt2")
    tensors = load_file(folder / SINGLE)
    name = next(n for n in tensors if n.endswith("h.0.mlp.c_fc.weight"))
    other = name.removeprefix("transformer.") if name.startswith("transformer.") else f"transformer.{name}"
    save_file(tensors | {other: tensors[name] * 2}, folder / SINGLE, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"are both transformer\.h\.0\.mlp\.c_fc\.weight"):
        WeightStore(folder, cache=folder / "cache").manifest()
