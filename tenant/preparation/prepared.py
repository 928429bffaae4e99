"""The facts (public) and verification keys (secret) that a tenant keeps instead of a base model's weights, and the keys
as safetensors on its disk.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import safe_open
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
    """Facts and keys of a base model whose weights the tenant does not hold (`preparation.prepare` makes them).

    Args:
        second: reads a second set of verification keys, which confirms corrections in narrow rings
            (`symbiosis_priv.arithmetic.wraps`).
        blame: keys that attribute faults after a product was refused.
        own_digest: digest of the checkpoint's other tensors and config.json (`own_tensors`).
        tokenizer: SHA-256 of the checkpoint's tokenizer files and chat templates, by name; empty if it has none.
        forget_keys: deletes the cached verification keys, so that the next session draws new ones.
        folder: the private folder that holds all of this; None if it could not be written.
    """

    manifest: Manifest
    facts: tuple[GroupFacts, ...]
    keys: VerificationKeys
    second: Callable[[], VerificationKeys] = field(repr=False)
    blame: BlameKeys
    own_digest: str
    tokenizer: Mapping[str, str]
    checkpoint: str
    forget_keys: Callable[[], None] = field(repr=False)
    folder: Path | None = None


_SECRET = "secret"


def tensors_of(keys: VerificationKeys | BlameKeys) -> dict[str, Tensor]:
    secret = torch.tensor(list(keys.secret), dtype=torch.uint8, device="cpu")
    return {_SECRET: secret, **{_name(place): values for place, values in keys.products.items()}}


def read_keys(tensors: Mapping[str, Tensor], *, groups: int) -> VerificationKeys:
    """Read the verification keys of `groups` layer groups. Raises `KeyError`: tensors are missing;
    `CheckpointError`."""
    keys = VerificationKeys(_secret(tensors[_SECRET]))
    keys.products = {place: tensors[_name(place)] for place in _places(range(groups))}
    return keys


def open_blame_keys(path: Path, *, groups: int, stacks: Stacks = NO_STACKS) -> BlameKeys:
    """Open the blame keys of `groups` layer groups. A key is read from the file when it is needed, even if the file has
    been deleted since. Raises `CheckpointError`: keys are missing, or the secret is damaged."""
    file = safe_open(path, framework="pt", device="cpu")
    wanted = {_SECRET, *map(_name, _places(index for index in range(groups) if index not in stacks))}
    if missing := wanted - set(file.keys()):
        raise CheckpointError(f"{path} lacks {sorted(missing)}; delete it")
    secret = _secret(file.get_tensor(_SECRET))
    return BlameKeys(secret, read=lambda place: file.get_tensor(_name(place)), stacks=stacks)


def _places(indices: Iterable[int]) -> list[Place]:
    return [(GroupIndex(index), direction) for index in indices for direction in DIRECTIONS]


def _name(place: Place) -> str:
    index, direction = place
    return f"{index}.{direction}"


def _secret(tensor: Tensor) -> bytes:
    secret = bytes(tensor.tolist())
    if len(secret) != SEED_BYTES:
        raise CheckpointError("cached verification keys are damaged; delete them")
    return secret
