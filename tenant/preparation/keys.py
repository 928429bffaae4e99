"""Making what a tenant keeps of a base model, once, and finding it again at every start.

One pass over the full checkpoint makes the facts, the verification keys and the digest of the tenant's own tensors.
They go into a folder of the cache that no other user can change or replace (`PrivateFolder`), under a seal: a MAC by
the secret from which the keys are expanded. Files that do not fit their seal are made again, or refused where there is
no checkpoint to make them from. The seal tells damage from intact files. It does not tell whose keys they are: another
user who could put a whole folder there would bring a seal, too, and could then forge products.

The checkpoint that is loaded beside a preparation is checked, too: its own tensors, config.json and tokenizer must be
those of the checkpoint that was prepared. Tensors are hashed when a checkpoint is first loaded; after that the identity
of its files (inodes, sizes, times) stands for them.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import hmac
import logging
import os
import secrets
import shutil
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from symbiosis_priv.arithmetic.quantise import QuantisedGroup
from symbiosis_priv.arithmetic.ring import BACKWARD, FORWARD, Bound, Direction
from symbiosis_priv.checkpoints.checkpoint import Checkpoint
from symbiosis_priv.checkpoints.manifest import GroupEntry, Manifest
from symbiosis_priv.checkpoints.weights import Progress, WeightStore
from symbiosis_priv.errors import CheckpointError, ConfigError, RangeError
from symbiosis_priv.system.files import default_cache, storing, write_atomically
from symbiosis_priv.system.private import PrivateFolder
from tenant.core.facts import GroupFacts, Preparation
from tenant.core.verifier import BlameKeys, VerificationKeys
from tenant.preparation.own_tensors import own_digest, tokenizer_digests

log = logging.getLogger(__name__)

_MANIFEST, _FACTS, _KEYS, _ORIGIN = "manifest.json", "facts.safetensors", "keys.safetensors", "origin.json"
_BLAME, _SEAL = "blame.safetensors", "seal"
_SMALL = (_MANIFEST, _FACTS, _KEYS, _ORIGIN)  # read as a whole
_KNOWN = "known"
_VERSION = 4  # of these files
_PATIENCE_S, _POLL_S = 3600.0, 0.05  # with another process that makes keys: of large models it takes minutes


def prepare(
    store: WeightStore | None,
    *,
    digest: str,
    columns: int,
    model: WeightStore | None = None,
    weight_bits: int | None = None,
    reread: bool = False,
    cache: Path | None = None,
    progress: Progress | None = None,
) -> Preparation:
    """Load facts and verification keys for a manifest digest, or make them from the checkpoint.

    Args:
        store: the full base checkpoint; None if only cached facts may be used.
        digest: the manifest digest that the federation pins.
        columns: m, columns of the verification matrix.
        model: the checkpoint whose tensors are being loaded beside them, full or not; None if none is.
        weight_bits: what the federation says that the model is quantised to; None not to check.
        reread: read all of `store` again if its files are not those that were prepared from: the user's word that it is
            the right one, and the way to replace a preparation. What is made then must also be kept.

    Raises:
        CheckpointError: nothing (intact) cached and no full checkpoint; the checkpoint is not the pinned model; or
            `model` is another than the one that was prepared.
        StorageError: `reread`, and the cache cannot be written. Otherwise that costs time at the next start only.
        ConfigError: `weight_bits` is not the pinned model's, others than the user can change the cache, or another
            process is not done with it.
    """
    folder = (cache or default_cache()) / "tenant" / f"v{_VERSION}-{digest.removeprefix('sha256:')}-{columns}"
    whole = (folder / _SEAL).exists() and not reread
    with contextlib.nullcontext() if whole else _alone(folder.parents[1]):
        prepared = _load(folder, digest=digest, columns=columns, store=store)
        if prepared is not None and reread and store is not None:
            same_tokenizer = tokenizer_digests(store.path) == prepared.tokenizer
            if not (same_tokenizer and _is_known(folder, prepared, _identity(store))):
                prepared = None
        if prepared is None:
            assert store is not None  # `_load` has raised otherwise
            prepared = _make(store, folder, digest=digest, columns=columns, must_keep=reread, progress=progress)
    if weight_bits not in (None, prepared.manifest.weight_bits):
        raise ConfigError(
            f"model {digest} has {prepared.manifest.weight_bits} weight bits, but the federation file says "
            f"{weight_bits}; correct weight_bits or digest under [model]"
        )
    if model is not None:
        _bind(folder, prepared, model)
    return prepared


def _make(
    store: WeightStore, folder: Path, *, digest: str, columns: int, must_keep: bool, progress: Progress | None
) -> Preparation:
    keys, blame = VerificationKeys.fresh(), BlameKeys.fresh(columns=columns)
    identity = _identity(store)

    def look(index: int, entry: GroupEntry, group: QuantisedGroup) -> GroupFacts:
        keys.add(index, group.weight)
        blame.add(index, group.weight, weight_bits=store.weight_bits)
        return GroupFacts.of(entry, group)

    facts = store.each_group(look, threads=torch.get_num_threads(), progress=progress)
    manifest = store.assemble([f.entry for f in facts])
    if manifest.digest != digest:
        raise CheckpointError(
            f"{store.path} is model {manifest.digest}, but the federation pins {digest}. Use the checkpoint "
            f"(and weight_bits) that the providers serve, or correct [model] in the federation file."
        )
    prepared = Preparation(
        manifest=manifest,
        facts=tuple(facts),
        keys=keys,
        blame=blame,
        own_digest=own_digest(store, manifest),
        tokenizer=tokenizer_digests(store.path),
        checkpoint=str(store.path),
        forget_keys=lambda: _forget(folder),
    )
    _check_unchanged(store, identity)
    try:
        prepared = _save(folder, prepared, columns=columns)
    except OSError as error:
        if must_keep:
            raise
        log.warning(
            "cannot keep verification keys in %s (%s): they are made again at every start. Make room there, or choose "
            "another folder (RemoteConfig(cache=...), SYMBIOSIS_PRIV_CACHE)",
            folder,
            error,
        )
        return prepared
    _remember(folder, prepared, identity)
    return prepared


# On disk


@contextlib.contextmanager
def _alone(cache: Path, *, patience_s: float = _PATIENCE_S) -> Iterator[None]:
    """Whoever else starts now waits for these keys: some of one process and some of another's would be nobody's.

    Raises:
        ConfigError: somebody else has been at it for too long.
    """
    try:
        with PrivateFolder.open(cache, create=True) as opened:
            descriptor = opened.lockable()
    except OSError:  # where nothing can be written, nobody writes
        yield
        return
    try:
        until = time.monotonic() + patience_s
        while not _locked(descriptor):
            if time.monotonic() > until:
                raise ConfigError(
                    f"another process has been making verification keys in {cache} for {patience_s:g} s. Stop it if it "
                    f"hangs, or choose another folder (RemoteConfig(cache=...), SYMBIOSIS_PRIV_CACHE)"
                )
            time.sleep(_POLL_S)
        yield
    finally:
        os.close(descriptor)


def _locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        return True
    return True


def _load(folder: Path, *, digest: str, columns: int, store: WeightStore | None) -> Preparation | None:
    """None if there is nothing intact, and `store` to make it from."""
    try:
        with PrivateFolder.open(folder.parent) as parent, parent.subfolder(folder.name) as opened:
            return _read(opened, digest=digest, columns=columns)
    except ConfigError:
        raise
    except (OSError, SafetensorError, KeyError, IndexError, ValueError, CheckpointError, RangeError) as error:
        missing = f"nothing is prepared for model {digest}"
        if folder.exists():
            missing = f"what was prepared for model {digest} in {folder} has been changed or is damaged ({error})"
            log.warning("%s", missing)
    if store is None:
        raise CheckpointError(
            f"{missing}. Run `symbiosis-priv tenant prepare --model FULL_CHECKPOINT --federation federation.toml`, "
            f"or pass RemoteConfig(checkpoint='FULL_CHECKPOINT') once."
        )
    return None


def _read(folder: PrivateFolder, *, digest: str, columns: int) -> Preparation:
    """Read what `_save` has written. The bytes that the seal is compared with are the bytes that are used."""
    with contextlib.suppress(FileNotFoundError):
        folder.subfolder(_KNOWN).close()
    files = {name: folder.read(name) for name in (*_SMALL, _SEAL)}
    manifest = Manifest.from_json(files[_MANIFEST])
    keys = VerificationKeys.from_tensors(load(files[_KEYS]), groups=len(manifest.groups))
    blame, blame_digest = _open_blame(folder, columns=columns, groups=len(manifest.groups))
    if not hmac.compare_digest(files[_SEAL], _seal(keys, files, blame_digest)):
        raise CheckpointError("the seal is not that of the files")
    if manifest.digest != digest:
        raise CheckpointError(f"it is another model, {manifest.digest}")
    origin = msgspec.json.decode(files[_ORIGIN], type=_Origin)
    tensors = load(files[_FACTS])
    facts = []
    for i, entry in enumerate(manifest.groups):
        norms = tensors[f"{i}.norms"].tolist()
        bounds: dict[Direction, Bound] = {
            FORWARD: Bound(inputs=entry.inputs, weight_absmax=int(norms[0]), weight_norm=norms[1]),
            BACKWARD: Bound(inputs=entry.stacked_outputs, weight_absmax=int(norms[0]), weight_norm=norms[2]),
        }
        facts.append(GroupFacts(entry, tensors[f"{i}.channel_scale"], tensors.get(f"{i}.bias"), bounds))
    return Preparation(
        manifest=manifest,
        facts=tuple(facts),
        keys=keys,
        blame=blame,
        own_digest=origin.own_digest,
        tokenizer=origin.tokenizer,
        checkpoint=origin.checkpoint,
        forget_keys=lambda: _forget(folder.path),
    )


def _open_blame(folder: PrivateFolder, *, columns: int, groups: int) -> tuple[BlameKeys, str]:
    """The keys, which stay on disk until they are needed, and the digest of their file."""
    with os.fdopen(folder.open_file(_BLAME), "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return BlameKeys.open(Path(f"/dev/fd/{file.fileno()}"), columns=columns, groups=groups), digest


class _Origin(msgspec.Struct, frozen=True, kw_only=True):
    """origin.json: from which checkpoint it was made, and the digest of what stays with the tenant."""

    checkpoint: str
    own_digest: str
    tokenizer: dict[str, str]


def _save(folder: Path, prepared: Preparation, *, columns: int) -> Preparation:
    """Write a preparation into a new folder, and put the folder in place of an earlier one.

    Returns:
        `prepared`, its blame keys on disk and read through the descriptor of the new folder. Nothing else is read back.

    Raises:
        StorageError: the folder cannot be written.
        ConfigError: other users can change a folder above it.
    """
    tensors = {}
    for i, fact in enumerate(prepared.facts):
        forward, backward = fact.bounds[FORWARD], fact.bounds[BACKWARD]
        norms = (forward.weight_absmax, forward.weight_norm, backward.weight_norm)
        tensors[f"{i}.norms"] = torch.tensor(norms, dtype=torch.float64, device="cpu")
        tensors[f"{i}.channel_scale"] = fact.channel_scale
        if fact.bias is not None:
            tensors[f"{i}.bias"] = fact.bias
    origin = _Origin(checkpoint=prepared.checkpoint, own_digest=prepared.own_digest, tokenizer=dict(prepared.tokenizer))
    files = {
        _FACTS: save(tensors),
        _KEYS: save(prepared.keys.to_tensors()),
        _MANIFEST: prepared.manifest.to_json(),
        _ORIGIN: msgspec.json.encode(origin),
    }
    blame = save(prepared.blame.to_tensors())
    seal = _seal(prepared.keys, files, hashlib.sha256(blame).hexdigest())
    partial = f".{secrets.token_hex(8)}"
    with storing(folder), PrivateFolder.open(folder.parent, create=True) as parent:
        try:
            with parent.subfolder(partial, create=True) as opened:
                for name, content in (files | {_BLAME: blame, _SEAL: seal}).items():
                    opened.write(name, content)
                on_disk, _ = _open_blame(opened, columns=columns, groups=len(prepared.facts))
            parent.delete(folder.name)
            parent.rename(partial, folder.name)
        except BaseException:
            parent.delete(partial)
            raise
    return replace(prepared, blame=on_disk)


def _seal(keys: VerificationKeys, files: Mapping[str, bytes], blame_digest: str) -> bytes:
    return keys.mac("seal", *(hashlib.sha256(files[name]).hexdigest() for name in _SMALL), blame_digest)


def _forget(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    if folder.exists():
        log.error("cannot delete %s: a provider has failed a check under its verification keys; delete it", folder)


# The checkpoint beside it


def _bind(folder: Path, prepared: Preparation, model: WeightStore) -> None:
    """Refuse a checkpoint whose own tensors are not those that were prepared: it would make a hybrid of two models.

    Its tokenizer's files have to be those that were prepared, too, unless one of the two folders has none.
    """
    tokenizer = tokenizer_digests(model.path)
    if tokenizer and prepared.tokenizer and tokenizer != prepared.tokenizer:
        other = sorted(name for name, _ in tokenizer.items() ^ prepared.tokenizer.items())
        raise CheckpointError(
            f"the tokenizer or chat template of {model.path} is not that of {prepared.checkpoint}, which was prepared: "
            f"{', '.join(dict.fromkeys(other))}. A template decides how many rows a text becomes, and providers see "
            f"that. If you trust the files, run `symbiosis-priv tenant prepare --model {model.path} --federation "
            f"federation.toml`"
        )
    identity = _identity(model)
    if _is_known(folder, prepared, identity):
        return
    if own_digest(model, prepared.manifest) != prepared.own_digest:
        raise CheckpointError(
            f"{model.path} is not the checkpoint that was prepared for model {prepared.manifest.digest}: its "
            f"config.json or the tensors that stay with you (embeddings, norms) are not those of "
            f"{prepared.checkpoint}. Load that one or its slim copy. If {model.path} is what the providers serve, run "
            f"`symbiosis-priv tenant prepare --model {model.path} --federation federation.toml`"
        )
    _check_unchanged(model, identity)
    _remember(folder, prepared, identity)


def _is_known(folder: Path, prepared: Preparation, identity: str) -> bool:
    with contextlib.suppress(OSError):
        return hmac.compare_digest((folder / _KNOWN / identity).read_bytes(), prepared.keys.mac("known", identity))
    return False


def _remember(folder: Path, prepared: Preparation, identity: str) -> None:
    with contextlib.suppress(OSError):  # then it is hashed again next time
        (folder / _KNOWN).mkdir(mode=0o700, exist_ok=True)
        write_atomically(folder / _KNOWN / identity, prepared.keys.mac("known", identity), mode=0o600)


def _identity(model: WeightStore) -> str:
    """The identity of the checkpoint's files. Take it before the files are read, and compare it afterwards."""
    with Checkpoint(model.path) as checkpoint:
        return checkpoint.identity()


def _check_unchanged(model: WeightStore, identity: str) -> None:
    """Refuse what was read from files that have been replaced or written to since their identity was taken."""
    if _identity(model) != identity:
        raise CheckpointError(f"{model.path} changed while it was being read; start again")
