"""What is kept of a base model: public facts, secret keys, one pass over the checkpoint."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from symbiosis_priv.errors import CheckpointError
from symbiosis_priv.modular import dot
from symbiosis_priv.ring import DIRECTIONS, FORWARD
from symbiosis_priv.weights import WeightStore
from tenant.facts import GroupFacts, Preparation, prepare

DIRECT = ["gpt2_store", "store"]
KEYS = ["keys.safetensors", "blame.safetensors"]


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
    kept = [(folder_of(tmp_path) / name).read_bytes() for name in KEYS]
    again = prepared(base, digest, tmp_path)
    keys, blame = again.keys, again.blame
    assert [(folder_of(tmp_path) / name).read_bytes() for name in KEYS] == kept
    for index, facts in enumerate(prepared(None, digest, tmp_path).facts):
        weight = base.group(index).weight.to(torch.int32)
        for direction in DIRECTIONS:
            rows = torch.randint(-(2**31), 2**31, (3, facts.inputs(direction)), dtype=torch.int32)
            answer = rows @ (weight.t() if direction == FORWARD else weight)
            assert blame.accepts(index, direction, rows=rows, answer=answer)
            small = rows >> 24
            product = small @ (weight.t() if direction == FORWARD else weight)
            r, v = keys.columns(index, direction)
            assert torch.equal(dot(product, r), dot(small, v))
            answer[1, 1] += 1
            product[1, 1] += 1
            assert not blame.accepts(index, direction, rows=rows, answer=answer)
            assert (dot(product, r) == dot(small, v)).tolist() == [True, False, True]


def test_only_the_owner_may_read_the_keys(store: WeightStore, tmp_path: Path) -> None:
    prepared(store, store.manifest().digest, tmp_path)
    for name in KEYS:
        assert stat.S_IMODE((folder_of(tmp_path) / name).stat().st_mode) == 0o600


def test_no_weight_is_kept(store: WeightStore, tmp_path: Path) -> None:
    """Facts are O(o) and keys O(m (o + d)) per layer group."""
    prepared(store, store.manifest().digest, tmp_path, columns=8)
    sizes = {entry.inputs * entry.stacked_outputs for entry in store.manifest().groups}
    for name in ("facts.safetensors", *KEYS):
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
    with pytest.raises(
        CheckpointError, match=r"symbiosis-priv tenant prepare --model \S+ --federation \S+`.*RemoteConfig\(checkpoint="
    ):
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


@pytest.mark.parametrize("name", ["manifest.json", "facts.safetensors", *KEYS])
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


@pytest.mark.parametrize("name", KEYS)
def test_keys_without_some_layer_are_made_again(store: WeightStore, tmp_path: Path, name: str) -> None:
    digest = store.manifest().digest
    prepared(store, digest, tmp_path)
    path = folder_of(tmp_path) / name
    tensors = load_file(path)
    tensors.pop("3.forward")
    save_file(tensors, path)
    prepared(store, digest, tmp_path)
    assert len(load_file(path)) == 1 + 2 * 9


def test_who_lied_can_be_told_after_the_keys_are_deleted(store: WeightStore, tmp_path: Path) -> None:
    """A session goes on with who is honest, and may have to judge again."""
    prepared(store, store.manifest().digest, tmp_path)
    kept = prepared(None, store.manifest().digest, tmp_path)
    kept.forget_keys()
    assert not list((tmp_path / "tenant").iterdir())
    weight = store.group(2).weight.to(torch.int32)
    rows = torch.randint(-(2**31), 2**31, (3, weight.shape[1]), dtype=torch.int32)
    assert kept.blame.accepts(2, FORWARD, rows=rows, answer=rows @ weight.t())
    assert not kept.blame.accepts(2, FORWARD, rows=rows, answer=rows @ weight.t() + 1)
