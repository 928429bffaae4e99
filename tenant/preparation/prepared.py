"""The facts (public) and verification keys (secret) that a tenant keeps instead of a base model's weights, and the keys
as safetensors on its disk.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from symbiosis_priv.arithmetic.keystream import SEED_BYTES
from symbiosis_priv.arithmetic.ring import DIRECTIONS
from symbiosis_priv.checkpoints.manifest import GroupFacts, Manifest
from symbiosis_priv.errors import CheckpointError
from symbiosis_priv.limits import GroupIndex
from tenant.core.blame import NO_STACKS, BlameKeys, Stacks
from tenant.core.verifier import Place, VerificationKeys


@dataclass(frozen=True, kw_only=True)
class Preparation:
    """Facts and keys of a base model whose weights the tenant does not hold (`keys.prepare` makes them)."""

    manifest: Manifest
    facts: tuple[GroupFacts, ...]
    keys: VerificationKeys
    second: Callable[[], VerificationKeys] = field(repr=False)  # reads those that confirm corrections in narrow rings
    blame: BlameKeys  # attribute faults after a product was refused
    own_digest: str  # of the checkpoint's other tensors and config.json
    tokenizer: Mapping[str, str]  # SHA-256 of the tokenizer files and chat templates, by name
    checkpoint: str
    forget_keys: Callable[[], None] = field(
        repr=False
    )  # deletes the cached keys, so that the next session draws others
    folder: Path | None = None  # the private folder that holds all of this; None if it could not be written


_SECRET = "secret"


def tensors_of(keys: VerificationKeys | BlameKeys) -> dict[str, Tensor]:
    secret = torch.tensor(list(keys.secret), dtype=torch.uint8, device="cpu")
    return {_SECRET: secret, **{name_of(place): values for place, values in keys.products.items()}}


def read_keys(tensors: Mapping[str, Tensor], *, groups: int) -> VerificationKeys:
    """Read the verification keys of `groups` layer groups. Raises `KeyError`: tensors are missing;
    `CheckpointError`."""
    keys = VerificationKeys(_secret(tensors[_SECRET]))
    keys.products = {place: tensors[name_of(place)] for place in _places(range(groups))}
    return keys


def read_blame_keys(file: Any, *, groups: int, stacks: Stacks = NO_STACKS) -> BlameKeys:
    """Return the blame keys of `groups` layer groups, which are read from an open `safe_open` when they are needed.
    Raises `CheckpointError`: keys are missing, or the secret is damaged."""
    wanted = {_SECRET, *map(name_of, _places(index for index in range(groups) if index not in stacks))}
    if missing := wanted - set(file.keys()):
        raise CheckpointError(f"the blame keys lack {sorted(missing)}; delete them")
    secret = _secret(file.get_tensor(_SECRET))
    return BlameKeys(secret, read=lambda place: file.get_tensor(name_of(place)), stacks=stacks)


def _places(indices: Iterable[int]) -> list[Place]:
    return [(GroupIndex(index), direction) for index in indices for direction in DIRECTIONS]


def name_of(place: Place) -> str:
    """The name of a key's tensor, or of a hint's file."""
    index, direction = place
    return f"{index}.{direction}"


def _secret(tensor: Tensor) -> bytes:
    secret = bytes(tensor.tolist())
    if len(secret) != SEED_BYTES:
        raise CheckpointError("cached verification keys are damaged; delete them")
    return secret
