"""Checkpoints of mixtures of experts, made once."""

import functools
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.experts import write


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`checkpoint(family)`: its folder."""
    return functools.cache(lambda family: write(family, tmp_path_factory.mktemp(family)))
