"""Numbers that command lines, configuration files and arithmetic share; free of torch, so that `--help` is too."""

from __future__ import annotations

from typing import Final

MIN_WEIGHT_BITS: Final = 4
MAX_WEIGHT_BITS: Final = 12
DEFAULT_WEIGHT_BITS: Final = 10
