"""The preparation of a base model: public facts and secret keys, from one pass over the checkpoint."""

import json
import os
import re
import shutil
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file, save, save_file
from torch import Tensor

from symbiosis_priv.arithmetic.modular import Column, dot
from symbiosis_priv.arithmetic.ring import DIRECTIONS, FORWARD
from symbiosis_priv.checkpoints.checkpoint import Checkpoint
from symbiosis_priv.checkpoints.manifest import GroupFacts, Manifest
from symbiosis_priv.checkpoints.weights import WeightStore
from symbiosis_priv.errors import CheckpointError, ConfigError, StorageError
from symbiosis_priv.limits import GroupIndex
from symbiosis_priv.system.cache_key import cache_key
from tenant.core.blame import BlameKeys
from tenant.core.verifier import VerificationKeys
from tenant.preparation import keys as preparation
from tenant.preparation.keys import _alone, prepare
from tenant.preparation.own_tensors import own_digest, tokenizer_files, write_slim
from tenant.preparation.prepared import Preparation, read_blame_keys, read_keys, tensors_of
from tests.cases import cases
from tests.experts import write

DIRECT = ["gpt2_store", "store"]
KEYS = ["keys.safetensors", "blame.safetensors", "second.safetensors"]


def prepared(store: WeightStore | None, digest: str, cache: Path) -> Preparation:
    return prepare(store, digest=digest, cache=cache)


def folder_of(cache: Path) -> Path:
    (folder,) = (cache / "tenant").iterdir()
    return folder


@pytest.fixture(params=DIRECT)
def base(request: pytest.FixtureRequest) -> WeightStore:
    """A checkpoint with biases, and one without."""
    store: WeightStore = request.getfixturevalue(request.param)
    return store


@pytest.fixture(scope="module")
def original(store: WeightStore, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache with the preparation of `store`."""
    cache = tmp_path_factory.mktemp("original")
    prepared(store, store.manifest().digest, cache)
    return cache


@pytest.fixture
def cache(original: Path, tmp_path: Path) -> Path:
    """A copy of the cache that the test may change."""
    return Path(shutil.copytree(original, tmp_path / "cache"))


def same_facts(a: GroupFacts, b: GroupFacts) -> bool:
    biases = (a.bias is None and b.bias is None) or (
        a.bias is not None and b.bias is not None and torch.equal(a.bias, b.bias)
    )
    return a.entry == b.entry and a.bounds == b.bounds and torch.equal(a.channel_scale, b.channel_scale) and biases


def test_facts_follow_from_the_weights_and_survive_the_disk(base: WeightStore, tmp_path: Path) -> None:
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
        group, weight = GroupIndex(index), base.group(index).weight.to(torch.int32)
        for direction in DIRECTIONS:
            rows = torch.randint(-(2**31), 2**31, (3, facts.inputs(direction)), dtype=torch.int32)
            answer = rows @ (weight.t() if direction == FORWARD else weight)
            assert blame.accepts(group, direction, rows=rows, answer=answer)
            small = rows >> 24
            product = small @ (weight.t() if direction == FORWARD else weight)
            r, v = keys[group, direction]
            assert torch.equal(dot(product, r), dot(small, v))
            answer[1, 1] += 1
            product[1, 1] += 1
            assert not blame.accepts(group, direction, rows=rows, answer=answer)
            assert (dot(product, r) == dot(small, v)).tolist() == [True, False, True]


def test_the_second_keys_and_the_blame_keys_are_independent_of_the_first(base: WeightStore, tmp_path: Path) -> None:
    """A correction needs two columns that a provider would have to hit at once, so one must not follow from another."""
    fresh, digest = prepared(base, base.manifest().digest, tmp_path), base.manifest().digest
    for own in (fresh, prepared(None, digest, tmp_path)):
        second = own.second()
        assert len({own.keys.secret, second.secret, own.blame.secret}) == 3
        for index in map(GroupIndex, range(len(own.facts))):
            for direction in DIRECTIONS:
                for one, other in zip(own.keys[index, direction], second[index, direction], strict=True):
                    assert not bool((one.values == other.values).any())


def test_processes_that_start_together_get_the_same_keys(llama: Path, store: WeightStore, tmp_path: Path) -> None:
    """No process gets keys that are partly another process's."""
    digest = store.manifest().digest
    together = threading.Barrier(4)

    def start(_: int) -> Preparation:
        own = WeightStore(llama)
        together.wait(20)
        return prepared(own, digest, tmp_path)

    with ThreadPoolExecutor(4) as pool:
        keys = [tensors_of(found.keys) for found in pool.map(start, range(4))]
    assert all(torch.equal(other[name], keys[0][name]) for other in keys for name in keys[0])


def test_the_wait_for_another_process_is_limited(tmp_path: Path) -> None:
    with _alone(tmp_path), pytest.raises(ConfigError, match="another process"), _alone(tmp_path, patience_s=0.1):
        pass
    with _alone(tmp_path, patience_s=0.1):
        pass


def test_a_preparation_holds_no_weights(store: WeightStore, tmp_path: Path) -> None:
    """Facts are O(o) and keys O(m (o + d)) per layer group."""
    prepared(store, store.manifest().digest, tmp_path)
    sizes = {entry.inputs * entry.stacked_outputs for entry in store.manifest().groups}
    for name in ("facts.safetensors", *KEYS):
        for tensor in load_file(folder_of(tmp_path) / name).values():
            assert tensor.numel() < min(sizes)


def test_without_a_checkpoint_the_error_names_the_fix(tmp_path: Path) -> None:
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


@pytest.mark.parametrize("name", ["manifest.json", "facts.safetensors", *KEYS, "origin.json", "seal"])
@pytest.mark.parametrize("damage", ["gone", "empty", "cut", "garbage"])
def test_a_damaged_cache_is_made_again(store: WeightStore, cache: Path, name: str, damage: str) -> None:
    digest = store.manifest().digest
    path = folder_of(cache) / name
    whole = path.read_bytes()
    if damage == "gone":
        path.unlink()
    else:
        path.write_bytes({"empty": b"", "cut": whole[: len(whole) // 2], "garbage": bytes(100)}[damage])
    assert len(prepared(store, digest, cache).facts) == 9
    assert len(prepared(None, digest, cache).facts) == 9


# Integrity of the cache


def test_every_altered_tensor_is_detected(base: WeightStore, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Scales, biases, bounds, keys: each is altered minimally."""
    digest = base.manifest().digest
    truth = prepared(base, digest, tmp_path)
    altered = 0
    for file in ("facts.safetensors", *KEYS):
        path = folder_of(tmp_path) / file
        whole = path.read_bytes()
        tensors = load_file(path)
        for name in tensors:
            changed = {n: t.clone() for n, t in tensors.items()}
            changed[name].view(torch.uint8).view(-1)[0] ^= 1
            path.write_bytes(save(changed))
            with pytest.raises(CheckpointError, match=r"changed or is damaged .*tenant prepare --model"):
                prepared(None, digest, tmp_path)
            altered += 1
        path.write_bytes(whole)
    assert altered >= 4 * len(truth.facts)
    path.write_bytes(save(changed))
    again = prepared(base, digest, tmp_path)
    assert all(same_facts(a, b) for a, b in zip(again.facts, truth.facts, strict=True))
    assert "has been changed or is damaged" in caplog.text


@cases(__file__, "modes")
def test_a_cache_that_others_can_change_is_refused(store: WeightStore, cache: Path, name: str, mode: int) -> None:
    """Other users could store their own facts, keys and seal."""
    digest = store.manifest().digest
    (folder_of(cache) / name).chmod(mode)
    for source in (store, None):
        with pytest.raises(ConfigError, match=r"other users can .*Delete"):
            prepared(source, digest, cache)
    shutil.rmtree(folder_of(cache))
    prepared(store, digest, cache)


@pytest.mark.parametrize("preparing", [False, True])
@pytest.mark.parametrize("name", [".", "tenant", ".."])
def test_a_cache_below_a_folder_that_others_can_change_is_refused(
    store: WeightStore, original: Path, tmp_path: Path, name: str, preparing: bool
) -> None:
    """Other users could replace the folder by their own: with their keys, forged answers would verify."""
    digest, cache = store.manifest().digest, tmp_path / "above" / "cache"
    shutil.copytree(original, cache)
    place = (cache / name).resolve()
    if preparing:
        shutil.rmtree(place)
        place.mkdir()
    place.chmod(0o777)
    with pytest.raises(ConfigError, match="other users can change"):
        prepared(store, digest, cache)
    assert preparing or len(list(folder_of(cache).iterdir())) == 8  # nothing was written or deleted


def test_files_replaced_while_keys_are_made_are_not_used(
    store: WeightStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The keys in memory are used, not the files that are in the folder by then."""
    digest = store.manifest().digest
    prepared(store, digest, tmp_path / "attacker")
    forged = prepared(None, digest, tmp_path / "attacker")
    save_for_real = preparation._save

    def save_and_swap(folder: Path, made: Preparation, **options: Any) -> Preparation:
        used = save_for_real(folder, made, **options)
        shutil.rmtree(folder)
        shutil.copytree(folder_of(tmp_path / "attacker"), folder)
        return used

    monkeypatch.setattr(preparation, "_save", save_and_swap)
    used = prepared(store, digest, tmp_path / "victim")
    assert not torch.equal(tensors_of(used.keys)["secret"], tensors_of(forged.keys)["secret"])


def test_a_cache_that_cannot_be_written_only_costs_time(
    store: WeightStore, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "full").write_text("no folder", encoding="utf-8")
    digest = store.manifest().digest
    kept, made = prepared(store, digest, tmp_path), prepared(store, digest, tmp_path / "full")
    assert all(map(same_facts, kept.facts, made.facts))
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "every start makes them again" in caplog.text
    rows = torch.ones((3, made.facts[0].inputs(FORWARD)), dtype=torch.int32)
    assert made.blame.accepts(GroupIndex(0), FORWARD, rows=rows, answer=store.matrix(0).product(rows))
    with pytest.raises(StorageError, match="choose another folder"):  # `tenant prepare` must store the preparation
        prepare(store, digest=digest, reread=True, cache=tmp_path / "full")


# Loading the prepared checkpoint only


@pytest.fixture
def model(llama: Path, tmp_path: Path) -> Path:
    """A copy of the Llama that the test may change."""
    return Path(shutil.copytree(llama, tmp_path / "model"))


def rewrite(folder: Path, **changes: Callable[[Tensor], Tensor]) -> None:
    """Change some tensors of a checkpoint of one file."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for name, change in changes.items():
        tensors[name] = change(tensors[name]).contiguous()
    save_file(tensors, path, metadata={"format": "pt"})


def bound(store: WeightStore, model: Path, cache: Path) -> Preparation:
    return prepare(None, digest=store.manifest().digest, model=WeightStore(model), cache=cache)


CHANGES: dict[str, Callable[[Path], None]] = {
    "embeddings times 3": lambda path: rewrite(path, **{"model.embed_tokens.weight": lambda t: t * 3}),
    "a norm times 2": lambda path: rewrite(path, **{"model.norm.weight": lambda t: t * 2}),
    "a norm negated": lambda path: rewrite(path, **{"model.layers.1.input_layernorm.weight": lambda t: -t}),
    "another dtype": lambda path: rewrite(path, **{"model.norm.weight": lambda t: t.bfloat16()}),
    "another config": lambda path: change_config(path, rms_norm_eps=0.25),
}


def change_config(folder: Path, **entries: object) -> None:
    config = json.loads((folder / "config.json").read_bytes())
    (folder / "config.json").write_text(json.dumps(config | entries))


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("met", [False, True])
def test_a_checkpoint_with_other_tensors_of_the_tenants_own_is_refused(
    store: WeightStore, model: Path, change: str, met: bool, cache: Path
) -> None:
    """The checkpoint is refused at every load, even if it was loaded once before the change."""
    if met:
        bound(store, model, cache)
    CHANGES[change](model)
    for _ in range(2):
        with pytest.raises(CheckpointError, match=rf"{model} is not the checkpoint that was prepared .*{store.path}"):
            bound(store, model, cache)


def test_changes_made_by_saving_do_not_matter(store: WeightStore, model: Path, cache: Path) -> None:
    change_config(model, transformers_version="6.0.0", _name_or_path="elsewhere")
    bound(store, model, cache)


@pytest.mark.parametrize("preparing", [False, True])
def test_files_replaced_while_they_are_hashed_are_hashed_again(
    store: WeightStore, model: Path, preparing: bool, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    digest = store.manifest().digest

    def swap_once_hashed(store: WeightStore, manifest: Manifest) -> str:
        found = own_digest(store, manifest)
        CHANGES["a norm times 2"](model)
        return found

    with monkeypatch.context() as patch:
        patch.setattr(preparation, "own_digest", swap_once_hashed)
        swapped = WeightStore(model)
        options: dict[str, Any] = {"store": swapped, "reread": True} if preparing else {"store": None, "model": swapped}
        with pytest.raises(CheckpointError, match="changed while"):
            prepare(**options, digest=digest, cache=cache)
    with pytest.raises(CheckpointError, match="is not the checkpoint"):
        bound(store, model, cache)


TOKENIZER_CHANGES: dict[str, Callable[[Path], object]] = {
    "a chat template": lambda path: (path / "chat_template.jinja").write_text("{{ messages }}"),
    "one of several": lambda path: (path / "additional_chat_templates" / "tools.jinja").write_text("other"),
    "a template in the configuration": lambda path: (path / "tokenizer_config.json").write_text('{"chat_template": 1}'),
    "other tokens": lambda path: (path / "tokenizer.json").write_text("[]"),
    "a file less": lambda path: (path / "tokenizer_config.json").unlink(),
}


@pytest.mark.parametrize("change", TOKENIZER_CHANGES)
def test_another_tokenizer_than_the_prepared_one_is_refused_until_the_user_prepares_it(
    store: WeightStore, model: Path, change: str, tmp_path: Path
) -> None:
    """A template decides how many rows a text becomes: a folder's template could make the bill reveal private text."""
    cache, digest, slim = tmp_path / "cache", store.manifest().digest, tmp_path / "slim"
    (model / "additional_chat_templates").mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "additional_chat_templates/tools.jinja"):
        (model / name).write_text("{}")
    manifest = prepared(WeightStore(model), digest, cache).manifest
    bound(store, store.path, cache)  # that folder has no tokenizer, so none is used
    write_slim(WeightStore(model), manifest, slim)
    bound(store, slim, cache)
    TOKENIZER_CHANGES[change](model)
    with pytest.raises(CheckpointError, match="tokenizer or chat template"):
        bound(store, model, cache)
    prepare(WeightStore(model), digest=digest, reread=True, cache=cache)
    bound(store, model, cache)


def test_a_forged_mark_is_refused(store: WeightStore, model: Path, cache: Path) -> None:
    """`known/` holds MACs, not only names."""
    CHANGES["a norm times 2"](model)
    with Checkpoint(model) as checkpoint:
        (folder_of(cache) / "known" / checkpoint.identity()).write_bytes(bytes(32))
    with pytest.raises(CheckpointError, match="is not the checkpoint"):
        bound(store, model, cache)


def test_reread_replaces_a_preparation_or_names_the_checkpoint(store: WeightStore, model: Path, cache: Path) -> None:
    """The user states that a checkpoint is trusted: this covers its own tensors, never the providers' weights."""
    digest = store.manifest().digest
    CHANGES["a norm times 2"](model)
    again = prepare(WeightStore(model), digest=digest, reread=True, cache=cache)
    assert again.checkpoint == str(model)
    bound(store, model, cache)
    with pytest.raises(CheckpointError, match="is not the checkpoint"):
        bound(store, store.path, cache)
    rewrite(model, **{"model.layers.0.mlp.down_proj.weight": lambda t: t * 2})
    with pytest.raises(CheckpointError, match=rf"is not the model {digest} .*: model\.layers\.0\.mlp\.down_proj has"):
        prepare(WeightStore(model), digest=digest, reread=True, cache=cache)
    other = WeightStore(model).manifest().digest
    with pytest.raises(CheckpointError, match=f"is model {other}, but the federation pins {digest}"):
        prepare(WeightStore(model), digest=digest, reread=True, cache=cache)


def test_weight_bits_are_checked_also_when_everything_is_cached(store: WeightStore, tmp_path: Path) -> None:
    digest = store.manifest().digest
    for bits in (10, None):
        prepare(store, digest=digest, weight_bits=bits, cache=tmp_path)
    with pytest.raises(ConfigError, match=r"has 10 weight bits, but the federation file says 8; correct weight_bits"):
        prepare(store, digest=digest, weight_bits=8, cache=tmp_path)


# A key from outside


def give_key(monkeypatch: pytest.MonkeyPatch, way: str, key: bytes, folder: Path) -> None:
    """Give this process a key as its starter does: through a descriptor, or as a credential of systemd."""
    cache_key.cache_clear()
    monkeypatch.delenv("SYMBIOSIS_PRIV_CACHE_KEY_FD", raising=False)
    monkeypatch.delenv("CREDENTIALS_DIRECTORY", raising=False)
    if way == "descriptor":
        reader, writer = os.pipe()
        os.write(writer, key)
        os.close(writer)
        monkeypatch.setenv("SYMBIOSIS_PRIV_CACHE_KEY_FD", str(reader))
    elif way == "credential":
        (folder / "symbiosis-priv.cache-key").write_bytes(key)
        monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(folder))


@pytest.fixture
def no_key_afterwards() -> Iterator[None]:
    yield
    cache_key.cache_clear()


@pytest.mark.usefixtures("no_key_afterwards")
@pytest.mark.parametrize("way", ["descriptor", "credential"])
def test_a_copied_cache_is_useless_without_its_key(
    store: WeightStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    digest, cache = store.manifest().digest, tmp_path / "cache"
    give_key(monkeypatch, way, b"k" * 32, tmp_path)
    made = prepared(store, digest, cache)
    stored = b"".join(path.read_bytes() for path in folder_of(cache).rglob("*") if path.is_file())
    secrets_of = [made.keys.secret, made.blame.secret, made.second().secret]
    assert not any(secret in stored for secret in secrets_of)
    columns = made.keys.products[GroupIndex(0), FORWARD].numpy().tobytes()
    assert columns[:16] not in stored
    again = prepared(None, digest, cache)
    assert [again.keys.secret, again.blame.secret, again.second().secret] == secrets_of
    assert all(same_facts(a, b) for a, b in zip(made.facts, again.facts, strict=True))
    give_key(monkeypatch, way, b"l" * 32, tmp_path)
    with pytest.raises(CheckpointError, match="under another key"):
        prepared(None, digest, cache)
    give_key(monkeypatch, "none", b"", tmp_path)
    with pytest.raises(CheckpointError, match=r"nothing is prepared .* without a key, only under one"):
        prepared(None, digest, cache)
    assert cache_key() is None
    for key in (b"", b"k" * 31, b"k" * 33):
        give_key(monkeypatch, way, key, tmp_path)
        with pytest.raises(ConfigError, match="32 bytes"):
            cache_key()


# The formats of keys and tokenizers

GROUP, STACK = GroupIndex(0), GroupIndex(1)

WEIGHT = torch.arange(6, dtype=torch.int16).view(2, 3)


def columns_of(keys: VerificationKeys) -> list[Column]:
    dense = [column for group in (GROUP, STACK) for way in DIRECTIONS for column in keys[group, way]]
    return dense + [column for way in DIRECTIONS for column in keys.expert_columns(STACK, way)[1]]


def test_keys_survive_the_disk_and_damaged_keys_are_refused(tmp_path: Path) -> None:
    keys, blame, path = VerificationKeys.fresh(), BlameKeys.fresh(), tmp_path / "blame.safetensors"
    keys.add(GROUP, WEIGHT)
    keys.add_stack(STACK, WEIGHT.repeat(4, 1), experts=2, transposed=False)
    tensors = tensors_of(keys)
    for before, after in zip(columns_of(keys), columns_of(read_keys(tensors, groups=2)), strict=True):
        assert torch.equal(before.values, after.values)
    with pytest.raises(KeyError):
        read_keys(tensors, groups=3)
    with pytest.raises(CheckpointError, match="damaged"):
        read_keys({**tensors, "secret": tensors["secret"][:31]}, groups=1)
    blame.add(GROUP, WEIGHT, weight_bits=12)
    tensors = tensors_of(blame)
    for changes, groups, words in (({}, 2, r"lack.*1\.backward"), ({"secret": tensors["secret"][1:]}, 1, "damaged")):
        save_file(tensors | changes, path)
        with pytest.raises(CheckpointError, match=words):
            read_blame_keys(safe_open(path, framework="pt"), groups=groups)


def test_experts_that_stay_are_those_of_the_federation(tmp_path: Path) -> None:
    """Otherwise a tenant with experts = "local" would mix two models, and every product would still verify."""
    cache = tmp_path / "cache"
    store = WeightStore(write("Mixtral", tmp_path / "model"), cache=cache)
    manifest = store.manifest()
    write_slim(store, manifest, tmp_path / "slim", keep_experts=True)
    other = shutil.copytree(tmp_path / "slim", tmp_path / "other")
    tensors = load_file(other / "model.safetensors")
    name = next(name for name in tensors if "experts.2." in name)
    save_file(tensors | {name: -tensors[name]}, other / "model.safetensors", metadata={"format": "pt"})

    def load(folder: Path) -> None:
        model = WeightStore(folder, cache=cache)
        prepare(store, digest=manifest.digest, model=model, cache=cache)

    load(tmp_path / "slim")
    with pytest.raises(CheckpointError, match="experts"):
        load(other)


def test_every_file_that_a_tokenizer_of_transformers_reads_is_bound(tmp_path: Path) -> None:
    """A file that is not bound could be replaced: it decides the number of rows of a text."""
    sources = (Path(transformers.__file__).parent / "models").glob("*/tokenization_*.py")
    stated = re.compile(r"^VOCAB_FILES_NAMES\b[^{]*({[^}]*})", re.MULTILINE)
    tables = [table for source in sources for table in stated.findall(source.read_text(encoding="utf-8"))]
    names = {name for table in tables for name in re.findall(r':\s*"([^"]+)"', table)}
    assert {"tokenizer.json", "spiece.model", "prophetnet.tokenizer"} <= names
    for name in names:
        (tmp_path / name).touch()
    assert {path.name for path in tokenizer_files(tmp_path)} == names
