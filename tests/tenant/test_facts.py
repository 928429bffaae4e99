"""What is kept of a base model: public facts, secret keys, one pass over the checkpoint."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from symbiosis_priv.errors import CheckpointError
from symbiosis_priv.ring import DIRECTIONS, FORWARD
from symbiosis_priv.weights import WeightStore
from tenant.facts import GroupFacts, Preparation, prepare

DIRECT = ["gpt2_store", "store"]


def prepared(store: WeightStore | None, digest: str, cache: Path, *, columns: int = 16) -> Preparation:
    return prepare(store, digest=digest, columns=columns, cache=cache)


def folder_of(cache: Path) -> Path:
    (folder,) = (cache / "tenant").iterdir()
    return folder


@pytest.fixture(params=DIRECT)
def base(request: pytest.FixtureRequest) -> WeightStore:
    """With biases and without."""
    store: WeightStore = request.getfixturevalue(request.param)
    return store


def same_facts(a: GroupFacts, b: GroupFacts) -> bool:
    biases = (a.bias is None and b.bias is None) or (
        a.bias is not None and b.bias is not None and torch.equal(a.bias, b.bias)
    )
    return a.entry == b.entry and a.bounds == b.bounds and torch.equal(a.channel_scale, b.channel_scale) and biases


def test_facts_are_those_of_the_weights_and_survive_the_disk(base: WeightStore, tmp_path: Path) -> None:
    digest = base.manifest().digest
    fresh = prepared(base, digest, tmp_path)
    cached = prepared(None, digest, tmp_path)
    truth = [GroupFacts.of(entry, base.group(i)) for i, entry in enumerate(base.manifest().groups)]
    for facts in (fresh.facts, cached.facts):
        assert all(same_facts(a, b) for a, b in zip(facts, truth, strict=True))
    assert fresh.manifest == cached.manifest == base.manifest()


def test_keys_are_made_once_and_work_from_the_disk(base: WeightStore, tmp_path: Path) -> None:
    digest = base.manifest().digest
    prepared(base, digest, tmp_path)
    kept = (folder_of(tmp_path) / "keys.safetensors").read_bytes()
    keys = prepared(base, digest, tmp_path).keys
    assert (folder_of(tmp_path) / "keys.safetensors").read_bytes() == kept
    for index, facts in enumerate(prepared(None, digest, tmp_path).facts):
        weight = base.group(index).weight.to(torch.int32)
        for direction in DIRECTIONS:
            rows = torch.randint(-(2**31), 2**31, (3, facts.inputs(direction)), dtype=torch.int32)
            answer = rows @ (weight.t() if direction == FORWARD else weight)
            assert keys.accepts(index, direction, rows=rows, answer=answer)
            answer[1, 1] += 1
            assert not keys.accepts(index, direction, rows=rows, answer=answer)


def test_only_the_owner_may_read_the_keys(store: WeightStore, tmp_path: Path) -> None:
    prepared(store, store.manifest().digest, tmp_path)
    assert stat.S_IMODE((folder_of(tmp_path) / "keys.safetensors").stat().st_mode) == 0o600


def test_no_weight_is_kept(store: WeightStore, tmp_path: Path) -> None:
    """Facts are O(o) and keys O(m (o + d)) per layer group."""
    prepared(store, store.manifest().digest, tmp_path, columns=8)
    sizes = {entry.inputs * entry.stacked_outputs for entry in store.manifest().groups}
    for name in ("facts.safetensors", "keys.safetensors"):
        for tensor in load_file(folder_of(tmp_path) / name).values():
            assert tensor.numel() < min(sizes)


def test_forgotten_keys_are_made_anew(store: WeightStore, tmp_path: Path) -> None:
    digest = store.manifest().digest
    before = prepared(store, digest, tmp_path)
    before.forget_keys()
    before.forget_keys()
    with pytest.raises(CheckpointError, match="nothing is prepared"):
        prepared(None, digest, tmp_path)
    after = prepared(store, digest, tmp_path)
    assert not torch.equal(before.keys.to_tensors()["secret"], after.keys.to_tensors()["secret"])


def test_other_columns_are_other_keys(store: WeightStore, tmp_path: Path) -> None:
    digest = store.manifest().digest
    for columns in (8, 16):
        prepared(store, digest, tmp_path, columns=columns)
    assert len(list((tmp_path / "tenant").iterdir())) == 2


def test_without_a_checkpoint_the_error_says_how_to_go_on(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"symbiosis-priv tenant prepare --model .*RemoteConfig\(checkpoint="):
        prepared(None, "sha256:" + 64 * "0", tmp_path)


def test_a_checkpoint_of_another_model_is_refused_and_leaves_nothing(
    store: WeightStore, gpt2_store: WeightStore, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match="but the federation pins"):
        prepared(gpt2_store, store.manifest().digest, tmp_path)
    assert not (tmp_path / "tenant").exists()


def test_other_weight_bits_are_another_model(llama: Path, store: WeightStore, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="weight_bits"):
        prepared(WeightStore(llama, weight_bits=8), store.manifest().digest, tmp_path)


@pytest.mark.parametrize("name", ["manifest.json", "facts.safetensors", "keys.safetensors"])
@pytest.mark.parametrize("damage", ["gone", "empty", "cut", "garbage"])
def test_a_damaged_cache_is_made_again(store: WeightStore, tmp_path: Path, name: str, damage: str) -> None:
    digest = store.manifest().digest
    prepared(store, digest, tmp_path)
    path = folder_of(tmp_path) / name
    whole = path.read_bytes()
    path.unlink()
    if damage != "gone":
        path.write_bytes({"empty": b"", "cut": whole[: len(whole) // 2], "garbage": bytes(100)}[damage])
    assert len(prepared(store, digest, tmp_path).facts) == 9
    assert len(prepared(None, digest, tmp_path).facts) == 9


def test_keys_without_some_layer_are_made_again(store: WeightStore, tmp_path: Path) -> None:
    digest = store.manifest().digest
    prepared(store, digest, tmp_path)
    path = folder_of(tmp_path) / "keys.safetensors"
    tensors = load_file(path)
    tensors.pop("3.forward")
    save_file(tensors, path)
    keys = prepared(store, digest, tmp_path).keys
    assert len(keys.to_tensors()) == 1 + 2 * 9
