"""Makes a tenant's preparation of a base model once, and loads it at every later start.

One pass over the full checkpoint makes the facts, the verification keys and the digest of the tenant's own tensors.
These are stored in a folder of the cache that no other user can change or replace (`PrivateFolder`), with a seal: a MAC
under the secret from which the keys are expanded. It detects damage; who could replace the whole folder could replace
the seal too, and could then forge products.

The checkpoint that is loaded with a preparation is checked too: its own tensors, config.json and tokenizer must equal
those of the prepared checkpoint. Tensors are hashed when a checkpoint is first loaded. Later loads compare the identity
of the checkpoint's files (inodes, sizes, times).
"""

import contextlib
import functools
import hashlib
import hmac
import logging
import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load, save
from torch import Tensor

from symbiosis_priv.arithmetic.keystream import derive
from symbiosis_priv.arithmetic.quantise import QuantisedGroup
from symbiosis_priv.arithmetic.ring import BACKWARD, FORWARD, Bound, Direction, bounds_of
from symbiosis_priv.checkpoints.checkpoint import Checkpoint
from symbiosis_priv.checkpoints.manifest import GroupEntry, GroupFacts, Manifest
from symbiosis_priv.checkpoints.weights import Progress, WeightStore
from symbiosis_priv.errors import CheckpointError, ConfigError, RangeError
from symbiosis_priv.kernels import RingMatrix
from symbiosis_priv.limits import GroupIndex
from symbiosis_priv.system.cache_key import cache_key, decrypted, encrypted
from symbiosis_priv.system.files import PrivateFolder, default_cache, lock, storing, write_atomically
from tenant.core.blame import DEFAULT_COLUMNS, BlameKeys
from tenant.core.verifier import VerificationKeys
from tenant.preparation.own_tensors import check_experts, own_digest, tokenizer_digests
from tenant.preparation.prepared import Preparation, read_blame_keys, read_keys, tensors_of

log = logging.getLogger(__name__)

_MANIFEST, _FACTS, _KEYS, _ORIGIN = "manifest.json", "facts.safetensors", "keys.safetensors", "origin.json"
_BLAME, _SECOND, _SEAL = "blame.safetensors", "second.safetensors", "seal"
_SMALL = (_MANIFEST, _FACTS, _KEYS, _ORIGIN)  # files that are read into memory
_KNOWN = "known"  # folder with one file for each hashed checkpoint, named by the checkpoint's identity
_VERSION = 5  # version of the file format
_PATIENCE_S = 3600.0  # wait for another process that makes keys, which takes minutes for a large model


def prepare(
    store: WeightStore | None,
    *,
    digest: str | None,
    model: WeightStore | None = None,
    weight_bits: int | None = None,
    reread: bool = False,
    cache: Path | None = None,
    progress: Progress | None = None,
) -> Preparation:
    """Load facts and verification keys for a manifest digest, or make them from the checkpoint.

    Args:
        store: the full base checkpoint; None to use cached files only.
        digest: the manifest digest that the federation pins; None for that of `store`.
        model: the checkpoint that is being loaded, full or slim; None if no checkpoint is loaded.
        weight_bits: the federation's weight bits; None to skip this check.
        reread: replace the preparation if the files of `store`, which the user trusts, have changed.

    Raises:
        CheckpointError: nothing intact is cached and there is no full checkpoint; the checkpoint is not the pinned
            model; or `model` is not the checkpoint that was prepared.
        StorageError: `reread` is set and the cache cannot be written. Without `reread` this is a warning only.
        ConfigError: the pinned model has other weight bits, or other users can change the cache, or hold it too long.
    """
    root = cache or default_cache()

    def place(digest: str) -> Path:
        under_key = "" if cache_key() is None else "-encrypted"
        return root / "tenant" / f"v{_VERSION}-{digest.removeprefix('sha256:')}-{DEFAULT_COLUMNS}{under_key}"

    if digest is None:
        assert store is not None
        with _alone(root):
            return _make(store, place, digest=None, pinned=None, must_keep=False, progress=progress)
    folder = place(digest)
    whole = (folder / _SEAL).exists() and not reread
    with contextlib.nullcontext() if whole else _alone(root):
        prepared = _load(folder, digest=digest, store=store)
        pinned = None if prepared is None else prepared.manifest
        if prepared is not None and reread and store is not None:
            same_tokenizer = tokenizer_digests(store.path) == prepared.tokenizer
            if not (same_tokenizer and _is_known(folder, prepared, _identity(store))):
                prepared = None
        if prepared is None:
            assert store is not None  # `_load` raises without a store
            _check_pinned(store, store.cached_manifest(), digest)
            prepared = _make(store, place, digest=digest, pinned=pinned, must_keep=reread, progress=progress)
    if weight_bits not in (None, prepared.manifest.weight_bits):
        raise ConfigError(
            f"model {digest} has {prepared.manifest.weight_bits} weight bits, but the federation file says "
            f"{weight_bits}; correct weight_bits or digest under [model]"
        )
    if model is not None:
        _bind(folder, prepared, model)
    return prepared


def _check_pinned(store: WeightStore, manifest: Manifest | None, digest: str) -> None:
    if manifest is not None and manifest.digest != digest:
        raise CheckpointError(
            f"{store.path} is model {manifest.digest}, but the federation pins {digest}. Use the checkpoint that the "
            f"providers serve, or correct [model] in the federation file (digest, weight_bits, round_trips, ...)."
        )


def _make(
    store: WeightStore,
    place: Callable[[str], Path],
    *,
    digest: str | None,
    pinned: Manifest | None,
    must_keep: bool,
    progress: Progress | None,
) -> Preparation:
    keys, second = VerificationKeys.fresh(), VerificationKeys.fresh()
    stacks = dict[GroupIndex, Callable[[], RingMatrix]]()
    blame = BlameKeys.fresh(stacks=stacks)
    identity = _identity(store)

    def look(index: GroupIndex, entry: GroupEntry, group: QuantisedGroup) -> GroupFacts:
        if pinned is not None and entry not in pinned.groups[index : index + 1]:
            raise CheckpointError(
                f"{store.path} is not the model {digest} that the federation pins: {entry.name} has other weights. Use "
                f"the checkpoint (and weight_bits) that the providers serve, or correct [model] in the federation file."
            )
        if entry.experts > 1:
            for columns_of in (keys, second):
                columns_of.add_stack(index, group.weight, experts=entry.experts, transposed=entry.transposed)
            stacks[index] = partial(_stack, str(store.path), entry, store.weight_bits)
        else:
            for columns_of in (keys, second):
                columns_of.add(index, group.weight)
            blame.add(index, group.weight, weight_bits=store.weight_bits)
        return GroupFacts.of(entry, group)

    facts = store.each_group(look, threads=torch.get_num_threads(), progress=progress)
    manifest = store.manifest()
    _check_pinned(store, manifest, digest or manifest.digest)
    folder = place(manifest.digest)
    prepared = Preparation(
        manifest=manifest,
        facts=tuple(facts),
        keys=keys,
        second=lambda: second,
        blame=blame,
        own_digest=own_digest(store, manifest),
        tokenizer=tokenizer_digests(store.path),
        checkpoint=str(store.path),
        forget_keys=lambda: _forget(folder),
    )
    _check_unchanged(store, identity)
    try:
        prepared = _save(folder, prepared)
    except OSError as error:
        if must_keep:
            raise
        log.warning(
            "cannot store verification keys in %s (%s), so every start makes them again. Free some disk space, or "
            "choose another folder (RemoteConfig(cache=...), SYMBIOSIS_PRIV_CACHE)",
            folder,
            error,
        )
        return prepared
    _remember(folder, prepared, identity)
    return prepared


def _stack(checkpoint: str, entry: GroupEntry, weight_bits: int) -> RingMatrix:
    weight = WeightStore(Path(checkpoint), weight_bits=weight_bits).quantised(entry).weight
    if entry.transposed:
        weight = weight.t().contiguous()
    height = len(weight) // entry.experts
    return RingMatrix(weight, weight_bits=weight_bits, height=height).as_stack(
        entry.experts, transposed=entry.transposed
    )


# On disk


@contextlib.contextmanager
def _alone(cache: Path, *, patience_s: float = _PATIENCE_S) -> Iterator[None]:
    """Context manager: lock the cache, so that files of two processes are not mixed."""
    try:
        with PrivateFolder.open(cache, create=True) as opened:
            descriptor = opened.lockable()
    except OSError:  # the cache cannot be written, so it needs no lock
        yield
        return
    try:
        with contextlib.suppress(OSError):  # a file system without locks
            if not lock(descriptor, patience_s=patience_s):
                raise ConfigError(
                    f"another process has been making verification keys in {cache} for {patience_s:g} s. Stop it if it "
                    f"hangs, or choose another folder (RemoteConfig(cache=...), SYMBIOSIS_PRIV_CACHE)"
                )
        yield
    finally:
        os.close(descriptor)


def _load(folder: Path, *, digest: str, store: WeightStore | None) -> Preparation | None:
    """Read a preparation. Without intact files, return None, or raise `CheckpointError` if `store` is None."""
    try:
        with PrivateFolder.open(folder.parent) as parent, parent.subfolder(folder.name) as opened:
            return _read(opened, digest=digest)
    except ConfigError:
        raise
    except (OSError, SafetensorError, KeyError, IndexError, ValueError, CheckpointError, RangeError) as error:
        missing = f"nothing is prepared for model {digest}"
        if folder.with_name(f"{folder.name}-encrypted").exists():
            missing += " without a key, only under one (SYMBIOSIS_PRIV_CACHE_KEY_FD, docs/enclave.md)"
        if folder.exists():
            missing = f"what was prepared for model {digest} in {folder} has been changed or is damaged ({error})"
            log.warning("%s", missing)
    if store is None:
        raise CheckpointError(
            f"{missing}. Run `symbiosis-priv tenant prepare --model FULL_CHECKPOINT --federation federation.toml`, "
            f"or pass RemoteConfig(checkpoint='FULL_CHECKPOINT') once."
        )
    return None


def _read(folder: PrivateFolder, *, digest: str) -> Preparation:
    """Read the files of `_save`. Each file is read once, so the bytes that the seal covers are the bytes in use."""
    with contextlib.suppress(FileNotFoundError):
        folder.subfolder(_KNOWN).close()
    files = {name: decrypted(name, folder.read(name)) for name in (*_SMALL, _SEAL)}
    manifest = Manifest.from_json(files[_MANIFEST])
    keys = read_keys(load(files[_KEYS]), groups=len(manifest.groups))
    origin = msgspec.json.decode(files[_ORIGIN], type=_Origin)
    blame, second, digests = _open_keys(folder, manifest, checkpoint=origin.checkpoint)
    if not hmac.compare_digest(files[_SEAL], _seal(keys, files, *digests)):
        raise CheckpointError("the seal is not that of the files")
    if manifest.digest != digest:
        raise CheckpointError(f"it is another model, {manifest.digest}")
    tensors = load(files[_FACTS])
    facts = []
    for i, entry in enumerate(manifest.groups):
        bounds = _bounds(entry, tensors[f"{i}.norms"])
        fact = GroupFacts(entry, tensors[f"{i}.channel_scale"], tensors.get(f"{i}.bias"), bounds)
        if entry.experts > 1:
            fact = fact.as_stack(_bounds(entry.by_expert, tensors[f"{i}.expert_norms"]))
        facts.append(fact)
    return Preparation(
        manifest=manifest,
        facts=tuple(facts),
        keys=keys,
        second=second,
        blame=blame,
        own_digest=origin.own_digest,
        tokenizer=origin.tokenizer,
        checkpoint=origin.checkpoint,
        forget_keys=lambda: _forget(folder.path),
        folder=folder.path,
    )


def _bounds(entry: GroupEntry, norms: Tensor) -> dict[Direction, Bound]:
    absmax, row, column = norms.tolist()
    return bounds_of(entry.inputs, entry.stacked_outputs, absmax=int(absmax), row_norm=row, column_norm=column)


def _norms(bounds: Mapping[Direction, Bound]) -> Tensor:  # from which `_bounds` makes bounds
    forward, backward = bounds[FORWARD], bounds[BACKWARD]
    norms = (forward.weight_absmax, forward.weight_norm, backward.weight_norm)
    return torch.tensor(norms, dtype=torch.float64, device="cpu")


def _open_keys(
    folder: PrivateFolder, manifest: Manifest, *, checkpoint: str
) -> tuple[BlameKeys, Callable[[], VerificationKeys], tuple[str, str]]:
    """Open the blame keys and the second verification keys. Each key is read when it is needed, even if the file has
    been deleted since. Returns them, and the digests of their files."""
    groups = manifest.groups
    stacks = {
        GroupIndex(index): partial(_stack, checkpoint, entry, manifest.weight_bits)
        for index, entry in enumerate(groups)
        if entry.experts > 1
    }
    (blame, blame_digest), (second, second_digest) = (_open_file(folder, name) for name in (_BLAME, _SECOND))

    @functools.cache
    def read() -> VerificationKeys:
        return read_keys({name: second.get_tensor(name) for name in second.keys()}, groups=len(groups))  # noqa: SIM118

    return read_blame_keys(blame, groups=len(groups), stacks=stacks), read, (blame_digest, second_digest)


def _open_file(folder: PrivateFolder, name: str) -> tuple[Any, str]:
    """Open a file of tensors, decrypted into memory if it is encrypted. Returns it, and the SHA-256 of its content."""
    descriptor = folder.open_file(name)
    if cache_key() is not None:
        with os.fdopen(descriptor, "rb") as stored:
            content = decrypted(name, stored.read())
        descriptor = os.memfd_create(name)
        with os.fdopen(os.dup(descriptor), "wb") as file:
            file.write(content)
        os.lseek(descriptor, 0, os.SEEK_SET)
    with os.fdopen(descriptor, "rb") as file:
        tensors = safe_open(f"/dev/fd/{file.fileno()}", framework="pt", device="cpu")
        return tensors, hashlib.file_digest(file, "sha256").hexdigest()


class _Origin(msgspec.Struct, frozen=True, kw_only=True):
    """origin.json: the checkpoint that was prepared, and the digests of the tenant's tensors and tokenizer."""

    checkpoint: str
    own_digest: str
    tokenizer: dict[str, str]


def _save(folder: Path, prepared: Preparation) -> Preparation:
    """Write a preparation into a new folder, which replaces the earlier one. Returns `prepared` with blame keys and
    second keys that are read from disk, through the new folder's descriptor. No other file is read back."""
    tensors = {}
    for i, fact in enumerate(prepared.facts):
        tensors[f"{i}.norms"] = _norms(fact.bounds)
        if fact.by_expert is not None:
            tensors[f"{i}.expert_norms"] = _norms(fact.by_expert.bounds)
        tensors[f"{i}.channel_scale"] = fact.channel_scale
        if fact.bias is not None:
            tensors[f"{i}.bias"] = fact.bias
    origin = _Origin(checkpoint=prepared.checkpoint, own_digest=prepared.own_digest, tokenizer=dict(prepared.tokenizer))
    files = {
        _FACTS: save(tensors),
        _KEYS: save(tensors_of(prepared.keys)),
        _MANIFEST: prepared.manifest.to_json(),
        _ORIGIN: msgspec.json.encode(origin),
    }
    blame = save(tensors_of(prepared.blame))
    second = save(tensors_of(prepared.second()))
    seal = _seal(prepared.keys, files, *(hashlib.sha256(content).hexdigest() for content in (blame, second)))
    partial = f".{secrets.token_hex(8)}"
    with storing(folder), PrivateFolder.open(folder.parent, create=True) as parent:
        try:
            with parent.subfolder(partial, create=True) as opened:
                for name, content in (files | {_BLAME: blame, _SECOND: second, _SEAL: seal}).items():
                    opened.write(name, encrypted(name, content))
                on_disk, second_on_disk, _ = _open_keys(opened, prepared.manifest, checkpoint=prepared.checkpoint)
            parent.delete(folder.name)
            parent.rename(partial, folder.name)
        except BaseException:
            parent.delete(partial)
            raise
    return replace(prepared, blame=on_disk, second=second_on_disk, folder=folder)


def _seal(keys: VerificationKeys, files: Mapping[str, bytes], *digests: str) -> bytes:
    """Return the MAC of the files, and of the digests of the files that are not read."""
    return mac(keys, "seal", *(hashlib.sha256(files[name]).hexdigest() for name in _SMALL), *digests)


def mac(keys: VerificationKeys, purpose: str, *parts: str) -> bytes:
    """Return 32 bytes that only a holder of these keys can compute, to authenticate the other files."""
    return hmac.digest(derive(keys.secret, "mac", purpose), msgspec.json.encode(parts), "sha256")


def _forget(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    if folder.exists():
        log.error("cannot delete %s: a provider has failed a check under its verification keys; delete it", folder)


# The loaded checkpoint


def _bind(folder: Path, prepared: Preparation, model: WeightStore) -> None:
    """Raise `CheckpointError` if a checkpoint's own tensors, experts, config.json or tokenizer are not those that were
    prepared: the result would mix two models. Tokenizers are compared only if both folders have some."""
    identity = _identity(model)
    known = _is_known(folder, prepared, identity)
    if not known and own_digest(model, prepared.manifest) != prepared.own_digest:
        raise CheckpointError(
            f"{model.path} is not the checkpoint that was prepared for model {prepared.manifest.digest}: its "
            f"config.json or the tensors that stay with you (embeddings, norms) are not those of "
            f"{prepared.checkpoint}. Load that checkpoint or its slim copy. If the providers serve {model.path}, run "
            f"`symbiosis-priv tenant prepare --model {model.path} --federation federation.toml`"
        )
    tokenizer = tokenizer_digests(model.path)
    if tokenizer and prepared.tokenizer and tokenizer != prepared.tokenizer:
        other = sorted(name for name, _ in tokenizer.items() ^ prepared.tokenizer.items())
        raise CheckpointError(
            f"the tokenizer or chat template of {model.path} is not that of {prepared.checkpoint}, which was prepared: "
            f"{', '.join(dict.fromkeys(other))}. Providers see how many rows a text becomes, and these files decide "
            f"that. If you trust the files, run `symbiosis-priv tenant prepare --model {model.path} --federation "
            f"federation.toml`"
        )
    if not known:
        check_experts(model, prepared.manifest)
        _check_unchanged(model, identity)
        _remember(folder, prepared, identity)


def _is_known(folder: Path, prepared: Preparation, identity: str) -> bool:
    with contextlib.suppress(OSError):
        return hmac.compare_digest((folder / _KNOWN / identity).read_bytes(), mac(prepared.keys, "known", identity))
    return False


def _remember(folder: Path, prepared: Preparation, identity: str) -> None:
    with contextlib.suppress(OSError):  # the next load hashes the tensors again
        (folder / _KNOWN).mkdir(mode=0o700, exist_ok=True)
        write_atomically(folder / _KNOWN / identity, mac(prepared.keys, "known", identity), mode=0o600)


def _identity(model: WeightStore) -> str:  # of the checkpoint's files, compared before and after reading
    with Checkpoint(model.path) as checkpoint:
        return checkpoint.identity()


def _check_unchanged(model: WeightStore, identity: str) -> None:
    """Raise `CheckpointError` if the identity of the checkpoint's files is not `identity`."""
    if _identity(model) != identity:
        raise CheckpointError(f"{model.path} changed while it was being read; run the command again")
