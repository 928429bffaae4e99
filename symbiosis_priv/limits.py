"""Words and numbers that command lines, files and arithmetic share; free of torch, so that `--help` is too."""

from __future__ import annotations

from typing import Final, Literal

Role = Literal["executor", "helper"]
"""What a provider is to a tenant."""

MAX_PAYLOAD: Final = (1 << 32) - 1
"""Bytes after a header, as many as its prefix can say."""
MAX_ROWS: Final = 1 << 24
"""Of a request."""

MIN_WEIGHT_BITS: Final = 4
MAX_WEIGHT_BITS: Final = 12
DEFAULT_WEIGHT_BITS: Final = 10
