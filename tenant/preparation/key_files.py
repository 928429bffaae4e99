"""Stores verification keys and blame keys as safetensors on the tenant's disk."""

from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from symbiosis_priv.arithmetic.keystream import SEED_BYTES
from symbiosis_priv.arithmetic.ring import DIRECTIONS
from symbiosis_priv.errors import CheckpointError
from symbiosis_priv.limits import GroupIndex
from tenant.core.blame import NO_STACKS, BlameKeys, Stacks
from tenant.core.verifier import Place, VerificationKeys

_SECRET = "secret"


def tensors_of(keys: VerificationKeys | BlameKeys) -> dict[str, Tensor]:
    """Return keys as tensors for safetensors."""
    secret = torch.tensor(list(keys.secret), dtype=torch.uint8, device="cpu")
    return {_SECRET: secret, **{_name(place): values for place, values in keys.products.items()}}


def read_keys(tensors: Mapping[str, Tensor], *, groups: int) -> VerificationKeys:
    """Read the verification keys of `groups` layer groups.

    Raises:
        KeyError: tensors are missing.
        CheckpointError: the secret is damaged.
    """
    keys = VerificationKeys(_secret(tensors[_SECRET]))
    keys.products = {place: tensors[_name(place)] for place in _places(range(groups))}
    return keys


def open_blame_keys(path: Path, *, columns: int, groups: int, stacks: Stacks = NO_STACKS) -> BlameKeys:
    """Open the blame keys of `groups` layer groups. A key is read from the file when it is needed, even if the file has
    been deleted since.

    Raises:
        CheckpointError: keys are missing, or the secret is damaged.
    """
    file = safe_open(path, framework="pt", device="cpu")
    wanted = {_SECRET, *map(_name, _places(index for index in range(groups) if index not in stacks))}
    if missing := wanted - set(file.keys()):
        raise CheckpointError(f"{path} lacks {sorted(missing)}; delete it")
    secret = _secret(file.get_tensor(_SECRET))
    return BlameKeys(secret, columns=columns, read=lambda place: file.get_tensor(_name(place)), stacks=stacks)


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
