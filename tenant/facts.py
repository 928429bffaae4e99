"""What a tenant keeps of a frozen layer group instead of its weights: public facts, and its secret verification keys.

Both come from one pass over the checkpoint, layer by layer (`prepare`), and are cached under the manifest's digest.
After that no weight of an offloaded layer is needed: a checkpoint with nothing but the tenant's tensors will do.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from symbiosis_priv.errors import CheckpointError
from symbiosis_priv.files import default_cache, write_atomically
from symbiosis_priv.manifest import GroupEntry, Manifest
from symbiosis_priv.quantise import QuantisedGroup
from symbiosis_priv.ring import BACKWARD, DIRECTIONS, FORWARD, Bound, Direction
from symbiosis_priv.weights import Progress, WeightStore
from tenant.verifier import BlameKeys, VerificationKeys

log = logging.getLogger(__name__)

_VERSION = 2  # of what is cached: keys modulo 2^61 - 1, and those that say who lied


@dataclass(frozen=True)
class GroupFacts:
    """Public facts of one layer group.

    Args:
        entry: names and widths, from the manifest.
        channel_scale: float64 `[o]`, the weight scales.
        bias: float64 `[o]` or None; the tenant adds it itself.
        bounds: how large input rows may be, per direction.
    """

    entry: GroupEntry
    channel_scale: Tensor
    bias: Tensor | None
    bounds: dict[Direction, Bound]

    @classmethod
    def of(cls, entry: GroupEntry, group: QuantisedGroup) -> GroupFacts:
        """Read the facts off a quantised group."""
        bias = None if group.bias is None else group.bias.to(torch.float64)
        return cls(entry, group.channel_scale, bias, {d: group.bound(d) for d in DIRECTIONS})

    def with_headroom(self, bits: int) -> GroupFacts:
        """The same with rows scaled down by that many bits (`Bound.with_headroom`)."""
        return replace(self, bounds={d: bound.with_headroom(bits) for d, bound in self.bounds.items()})

    def inputs(self, direction: Direction) -> int:
        """Columns of an input row."""
        return self.entry.columns(direction)[0]

    def outputs(self, direction: Direction) -> int:
        """Columns of an answer row."""
        return self.entry.columns(direction)[1]


@dataclass(frozen=True)
class Preparation:
    """Everything a tenant knows about a base model that it does not hold."""

    manifest: Manifest
    facts: tuple[GroupFacts, ...]
    keys: VerificationKeys
    blame: BlameKeys
    forget_keys: Callable[[], None] = field(repr=False)
    """Deletes the cached keys, so that the next session draws new ones."""


def prepare(
    store: WeightStore | None,
    *,
    digest: str,
    columns: int,
    cache: Path | None = None,
    progress: Progress | None = None,
) -> Preparation:
    """Load facts and verification keys for a manifest digest, or make them from the checkpoint.

    Args:
        store: the full base checkpoint; None if only cached facts may be used.
        digest: the manifest digest that the federation pins.
        columns: m, columns of the keys that say who lied.

    Raises:
        CheckpointError: nothing cached and no full checkpoint, or the checkpoint is not the pinned model.
    """
    folder = (cache or default_cache()) / "tenant" / f"v{_VERSION}-{digest.removeprefix('sha256:')}-{columns}"
    try:
        return _load(folder, digest=digest, columns=columns)
    except (FileNotFoundError, SafetensorError, KeyError, CheckpointError) as error:
        log.debug("no usable preparation in %s: %s", folder, error)
    if store is None:
        raise CheckpointError(
            f"nothing is prepared for model {digest}. Run `symbiosis-priv tenant prepare --model FULL_CHECKPOINT "
            f"--federation federation.toml`, or pass RemoteConfig(checkpoint='FULL_CHECKPOINT') once."
        )
    keys, blame = VerificationKeys.fresh(), BlameKeys.fresh(columns=columns)
    facts: list[GroupFacts] = []
    for entry, group in store.stream(progress=progress):
        keys.add(len(facts), group.weight)
        blame.add(len(facts), group.weight, weight_bits=store.weight_bits)
        facts.append(GroupFacts.of(entry, group))
    manifest = store.assemble([f.entry for f in facts])
    if manifest.digest != digest:
        raise CheckpointError(
            f"{store.path} is model {manifest.digest}, but the federation pins {digest}. Use the checkpoint "
            f"(and weight_bits) that the providers serve, or correct [model] in the federation file."
        )
    _save(folder, manifest, facts, keys, blame)
    return _load(folder, digest=digest, columns=columns)


def _load(folder: Path, *, digest: str, columns: int) -> Preparation:
    manifest = Manifest.from_json((folder / "manifest.json").read_bytes())
    if manifest.digest != digest:
        raise CheckpointError(f"{folder} holds another model")
    tensors = load_file(folder / "facts.safetensors")
    facts = []
    for i, entry in enumerate(manifest.groups):
        norms = tensors[f"{i}.norms"].tolist()
        bounds: dict[Direction, Bound] = {
            FORWARD: Bound(inputs=entry.inputs, weight_absmax=int(norms[0]), weight_norm=norms[1]),
            BACKWARD: Bound(inputs=entry.stacked_outputs, weight_absmax=int(norms[0]), weight_norm=norms[2]),
        }
        facts.append(GroupFacts(entry, tensors[f"{i}.channel_scale"], tensors.get(f"{i}.bias"), bounds))
    keys = VerificationKeys.from_tensors(load_file(folder / "keys.safetensors"), groups=len(facts))
    blame = BlameKeys.open(folder / "blame.safetensors", columns=columns, groups=len(facts))
    return Preparation(manifest, tuple(facts), keys, blame, lambda: _forget(folder))


def _save(folder: Path, manifest: Manifest, facts: list[GroupFacts], keys: VerificationKeys, blame: BlameKeys) -> None:
    tensors = {}
    for i, fact in enumerate(facts):
        forward, backward = fact.bounds[FORWARD], fact.bounds[BACKWARD]
        norms = (forward.weight_absmax, forward.weight_norm, backward.weight_norm)
        tensors[f"{i}.norms"] = torch.tensor(norms, dtype=torch.float64, device="cpu")
        tensors[f"{i}.channel_scale"] = fact.channel_scale
        if fact.bias is not None:
            tensors[f"{i}.bias"] = fact.bias
    write_atomically(folder / "facts.safetensors", save(tensors))
    write_atomically(folder / "keys.safetensors", save(keys.to_tensors()), mode=0o600)
    write_atomically(folder / "blame.safetensors", save(blame.to_tensors()), mode=0o600)
    write_atomically(folder / "manifest.json", manifest.to_json())


def _forget(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    if folder.exists():
        log.error("cannot delete %s: a provider has failed a check under its verification keys; delete it", folder)
