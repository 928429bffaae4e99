"""Keys survive the disk, and damaged files are refused."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from symbiosis_priv.arithmetic.modular import Column
from symbiosis_priv.arithmetic.ring import DIRECTIONS, FORWARD
from symbiosis_priv.errors import CheckpointError
from symbiosis_priv.limits import GroupIndex
from tenant.core.blame import BlameKeys
from tenant.core.verifier import VerificationKeys
from tenant.preparation.prepared import open_blame_keys, read_keys, tensors_of

GROUP, STACK = GroupIndex(0), GroupIndex(1)

WEIGHT = torch.arange(6, dtype=torch.int16).view(2, 3)


def keys_of_a_linear_and_a_stack() -> VerificationKeys:
    keys = VerificationKeys.fresh()
    keys.add(GROUP, WEIGHT)
    keys.add_stack(STACK, WEIGHT.repeat(4, 1), experts=2, transposed=False)
    return keys


def blame_keys(*, columns: int = 16) -> BlameKeys:
    keys = BlameKeys.fresh(columns=columns)
    keys.add(GROUP, WEIGHT, weight_bits=12)
    return keys


def columns_of(keys: VerificationKeys) -> list[Column]:
    dense = [column for group in (GROUP, STACK) for way in DIRECTIONS for column in keys[group, way]]
    return dense + [column for way in DIRECTIONS for column in keys.expert_columns(STACK, way)[1]]


def test_keys_survive_the_disk() -> None:
    keys = keys_of_a_linear_and_a_stack()
    again = read_keys(tensors_of(keys), groups=2)
    for before, after in zip(columns_of(keys), columns_of(again), strict=True):
        assert torch.equal(before.values, after.values)


def test_damaged_keys_are_refused() -> None:
    tensors = tensors_of(keys_of_a_linear_and_a_stack())
    with pytest.raises(KeyError):
        read_keys(tensors, groups=3)
    tensors["secret"] = tensors["secret"][:31]
    with pytest.raises(CheckpointError, match="damaged"):
        read_keys(tensors, groups=1)


def test_blame_keys_survive_the_disk(tmp_path: Path) -> None:
    rows = torch.tensor([[1, -2, 2**31 - 1]], dtype=torch.int32)
    path = tmp_path / "blame.safetensors"
    save_file(tensors_of(blame_keys(columns=9)), path)
    again = open_blame_keys(path, columns=9, groups=1)
    path.unlink()
    answer = rows @ WEIGHT.t().to(torch.int32)
    assert again.accepts(GROUP, FORWARD, rows=rows, answer=answer)
    assert not again.accepts(GROUP, FORWARD, rows=rows, answer=answer + 1)


def test_incomplete_or_damaged_blame_keys_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "blame.safetensors"
    tensors = tensors_of(blame_keys())
    save_file(tensors, path)
    with pytest.raises(CheckpointError, match=r"lacks.*1\.backward"):
        open_blame_keys(path, columns=16, groups=2)
    save_file({**tensors, "secret": tensors["secret"][:31].clone()}, path)
    with pytest.raises(CheckpointError, match="damaged"):
        open_blame_keys(path, columns=16, groups=1)
