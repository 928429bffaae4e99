"""Silences expected log messages."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def silenced(name: str) -> Iterator[None]:
    """Drop the warnings and errors of a package or module inside this block, which provokes them."""
    logger = logging.getLogger(name)
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(before)
