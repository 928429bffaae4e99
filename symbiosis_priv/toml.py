"""TOML files as typed, closed structures."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from symbiosis_priv.errors import ConfigError

T = TypeVar("T")


def load_toml(path: Path, kind: type[T]) -> T:
    """Read a TOML file into a typed, closed structure; every error names the file and the key.

    Fields of type `Path` are read relative to the file.
    """
    try:
        data: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error

    def relative(kind: type, value: object) -> Path:
        if kind is Path and isinstance(value, str):
            try:
                return path.parent / Path(value).expanduser()
            except RuntimeError as error:
                raise ValueError(f"{value!r}: there is no such home folder") from error
        raise ValueError("expected a path in quotes")

    try:
        return msgspec.convert(data, kind, dec_hook=relative)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{path}: {error}") from error
