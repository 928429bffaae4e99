"""The manifest: one digest per model for all file layouts, processes and caches; a cache is never trusted."""

import shutil
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel
from transformers.core_model_loading import Chunk, WeightConverter

from symbiosis_priv.arithmetic.quantise import Layer, QuantisedGroup, quantise
from symbiosis_priv.checkpoints.discovery import skeleton
from symbiosis_priv.checkpoints.layers import LayerRange
from symbiosis_priv.checkpoints.manifest import GroupEntry, Manifest
from symbiosis_priv.checkpoints.weights import WeightStore
from symbiosis_priv.errors import CheckpointError, ConfigError
from tests.compatibility.families import build

ROWS = torch.arange(3 * 32, dtype=torch.int32).reshape(3, 32) * 0x01234567


@pytest.fixture(params=["llama", "gpt2"])
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    model: PreTrainedModel = request.getfixturevalue(request.param)
    return model


@pytest.fixture
def path(model: PreTrainedModel, request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A checkpoint that a test may damage."""
    original = request.getfixturevalue(f"{model.config.model_type}_path")
    return Path(shutil.copytree(original, tmp_path / "model"))


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def from_model(model: PreTrainedModel, members: tuple[str, ...]) -> QuantisedGroup:
    """The oracle: quantised from the live model's modules, without files or a store."""
    layers = []
    for name in members:
        module = model.get_submodule(name)
        parameters = {kind: parameter.detach() for kind, parameter in module.named_parameters()}
        weight, bias = parameters["weight"], parameters.get("bias")
        layers.append(Layer(name, weight if isinstance(module, torch.nn.Linear) else weight.t(), bias))
    return quantise(layers)


def edit(path: Path, name: str, change: str) -> None:
    tensors = load_file(path / "model.safetensors")
    if change == "remove":
        del tensors[name]
    else:
        tensors[name].view(-1)[0] += 0.5
    save_file(tensors, path / "model.safetensors")


def first_weight(store: WeightStore) -> str:
    return f"{store.manifest().groups[0].members[0]}.weight"


def test_groups_equal_the_model(model: PreTrainedModel, path: Path, cache: Path) -> None:
    store = WeightStore(path, cache=cache)
    manifest = store.manifest()
    for i, entry in enumerate(manifest.groups):
        want = from_model(model, entry.members)
        assert store.quantised(entry).digest() == entry.digest == want.digest()
        assert want.weight.shape == (entry.stacked_outputs, entry.inputs)
        for layer, name in zip(store.layers(i), entry.members, strict=True):
            assert quantise([layer]).digest() == from_model(model, (name,)).digest()


def test_sharding_does_not_change_the_digest(model: PreTrainedModel, path: Path, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path / "sharded", max_shard_size="20KB")
    assert (tmp_path / "sharded" / "model.safetensors.index.json").is_file()
    whole = WeightStore(path, cache=tmp_path / "a").manifest()
    assert WeightStore(tmp_path / "sharded", cache=tmp_path / "b").manifest() == whole


@pytest.mark.parametrize("how", ["removed", "added"])
def test_names_with_and_without_prefix_are_one_model(
    how: str, model: PreTrainedModel, path: Path, tmp_path: Path
) -> None:
    """Published GPT-2 checkpoints use `h.0...`, transformers writes `transformer.h.0...`."""
    whole = WeightStore(path, cache=tmp_path / "a").manifest()
    prefix = model.base_model_prefix + "."
    tensors = load_file(path / "model.safetensors")
    renamed = {(n.removeprefix(prefix) if how == "removed" else prefix + n): t for n, t in tensors.items()}
    assert renamed.keys() != tensors.keys()
    save_file(renamed, path / "model.safetensors")
    assert WeightStore(path, cache=tmp_path / "b").manifest() == whole


def test_renamed_modules_are_read_as_in_transformers(tmp_path: Path) -> None:
    """GPT-NeoX checkpoints use `embed_out`; the model's head is `lm_head` now."""
    model = build("GPTNeoXForCausalLM")
    model.save_pretrained(tmp_path / "neox")
    assert "embed_out.weight" in load_file(tmp_path / "neox" / "model.safetensors")
    store = WeightStore(tmp_path / "neox", cache=tmp_path / "cache")
    assert store.is_complete()
    assert ("lm_head",) in [entry.members for entry in store.manifest().groups]
    for i, entry in enumerate(store.manifest().groups):
        assert store.group(i).digest() == from_model(model, entry.members).digest()


def test_weights_that_transformers_rearranges_are_read_by_its_rules(
    llama_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint with k and v in one tensor has the same manifest."""
    whole = WeightStore(llama_path, cache=tmp_path / "a").manifest()
    path = Path(shutil.copytree(llama_path, tmp_path / "fused"))
    tensors = load_file(path / "model.safetensors")
    for name in [name for name in tensors if "k_proj" in name]:
        both = tensors.pop(name), tensors.pop(name.replace("k_proj", "v_proj"))
        tensors[name.replace("k_proj", "kv_proj")] = torch.cat(both)
    save_file(tensors, path / "model.safetensors")
    rule = WeightConverter(["kv_proj.weight"], ["k_proj.weight", "v_proj.weight"], operations=[Chunk(dim=0)])
    monkeypatch.setattr(skeleton, "get_model_conversion_mapping", lambda _: [rule])
    monkeypatch.setattr(skeleton, "_kept", OrderedDict())  # made by other rules
    store = WeightStore(path, cache=tmp_path / "b")
    assert store.is_complete()
    assert store.manifest() == whole


@pytest.mark.parametrize("threads", [1, 3])
def test_streaming_gives_the_manifest_and_keeps_no_weights(
    path: Path, cache: Path, tmp_path: Path, threads: int
) -> None:
    store = WeightStore(path, cache=cache)
    calls: list[tuple[int, int]] = []
    entries = store.each_group(
        lambda _, entry, __: entry, threads=threads, progress=lambda done, total: calls.append((done, total))
    )
    manifest = store.manifest()
    total = len(manifest.groups)
    assert manifest.groups == tuple(entries)
    assert calls == [(i, total) for i in range(total + 1)]
    assert manifest == WeightStore(path, cache=tmp_path / "other").manifest()
    assert not list(cache.rglob("*.safetensors"))
    # A later store finds the manifest, quantises a group on demand and stores it packed.
    later = WeightStore(path, cache=cache)
    assert later.manifest() == manifest
    later.matrix(0)
    assert len(list(cache.rglob("*.safetensors"))) == 1


def test_files_that_are_replaced_while_they_are_read_get_no_manifest(path: Path, cache: Path) -> None:
    """Otherwise the manifest of the old files would be cached for the new files."""
    whole = (path / "model.safetensors").read_bytes()

    def swap(index: int, entry: GroupEntry, group: QuantisedGroup) -> None:
        if index == 0:
            (path / "new").write_bytes(whole)
            (path / "new").replace(path / "model.safetensors")

    with pytest.raises(CheckpointError, match="changed"):
        WeightStore(path, cache=cache).each_group(swap)
    assert not list(cache.rglob("manifest-*"))


def test_a_store_of_some_layers_packs_those_and_shares_them(path: Path, tmp_path: Path) -> None:
    """One cache for partial and whole stores of a machine, in any order; the digest is the whole model's."""
    whole = WeightStore(path, cache=tmp_path / "whole").manifest()

    def packed() -> dict[str, int]:
        return {file.name.partition("-")[0]: file.stat().st_ino for file in tmp_path.glob("weights/*-*.safetensors")}

    second = WeightStore(path, cache=tmp_path, layers=LayerRange(1, 1))
    assert second.manifest() == whole
    assert [whole.layers[group] for group in second.served] == [1] * whole.layers.count(1)
    digests = [group.digest for group in whole.groups]
    before = packed()
    assert before.keys() == {digests[group] for group in second.served}
    everything = WeightStore(path, cache=tmp_path)
    assert everything.served == range(len(digests))
    for index in everything.served:
        everything.matrix(index)
    assert packed().keys() == set(digests)
    assert packed().items() >= before.items()
    with pytest.raises(ConfigError, match="'1-2' goes beyond this model, whose layers are 0-1"):
        WeightStore(path, cache=tmp_path / "other", layers=LayerRange(1, 2)).manifest()


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"version":1}', b"\xff\xfe"])
def test_a_corrupt_manifest_is_made_again(content: bytes, path: Path, cache: Path) -> None:
    before = WeightStore(path, cache=cache).manifest()
    [file] = cache.rglob("manifest-*.json")
    file.write_bytes(content)
    assert WeightStore(path, cache=cache).manifest() == before
    assert Manifest.from_json(file.read_bytes()) == before


def test_an_edited_checkpoint_has_another_digest(path: Path, cache: Path) -> None:
    before = WeightStore(path, cache=cache)
    digest = before.manifest().digest
    edit(path, first_weight(before), "change")
    after = WeightStore(path, cache=cache).manifest()
    assert after.digest != digest
    assert [a.digest == b.digest for a, b in zip(after.groups, before.manifest().groups, strict=True)] == [
        False,
        *[True] * (len(after.groups) - 1),
    ]


def test_a_checkpoint_that_changes_in_use_is_noticed(path: Path, cache: Path) -> None:
    store = WeightStore(path, cache=cache)
    edit(path, first_weight(store), "change")
    shutil.rmtree(cache)
    with pytest.raises(CheckpointError, match="changed"):
        store.matrix(0)


def test_weight_bits_are_part_of_the_digest(path: Path, cache: Path) -> None:
    manifests = [WeightStore(path, weight_bits=bits, cache=cache).manifest() for bits in (8, 10)]
    assert manifests[0].digest != manifests[1].digest
    assert [manifest.weight_bits for manifest in manifests] == [8, 10]


def test_a_cache_that_cannot_be_written_only_costs_time(
    llama_path: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "full").write_text("no folder", encoding="utf-8")
    cached, uncached = (WeightStore(llama_path, cache=tmp_path / name) for name in ("empty", "full"))
    assert uncached.manifest() == cached.manifest()
    assert torch.equal(uncached.matrix(0).product(ROWS), cached.matrix(0).product(ROWS))
    assert [r.levelname for r in caplog.records] == ["WARNING"]  # logged once
    assert "choose another folder" in caplog.text
