"""Silences expected log messages."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def silenced(name: str) -> Iterator[None]:
    """Log no warnings and no errors of a package or module inside this block: the block provokes them."""
    logger = logging.getLogger(name)
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(before)
