"""Words and numbers that command lines, files and arithmetic share; free of torch, so that `--help` is too."""

from __future__ import annotations

from typing import Final, Literal

Role = Literal["executor", "helper"]
"""What a provider is to a tenant."""

MIN_WEIGHT_BITS: Final = 4
MAX_WEIGHT_BITS: Final = 12
DEFAULT_WEIGHT_BITS: Final = 10
