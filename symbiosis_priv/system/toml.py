"""TOML files as typed, closed structures, and the text of TOML tables."""

import json
import re
import tomllib
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from msgspec import inspect

from symbiosis_priv.errors import ConfigError
from symbiosis_priv.system.files import decode_text, read_limited

MAX_BYTES = 16 << 20  # size limit of a file, larger than any list of tenants or peers needs

T = TypeVar("T")
# what to do about keys of earlier releases
_GONE = {
    "capacity_layers": "layers = 'auto:16' under [model] takes its place: remove it",
    "endpoint": "own_process takes its place",
    "float": "float_memory_mib takes its place",
    "gateways": "devices takes its place",
    "max_inflight_mib_per_tenant": "it is half of max_inflight_mib: remove it",
    "relay": "effects are not relayed any more: remove it",
    "rebalance_s": "layers are chosen at the start: remove it",
    "request_timeout_s": "it is 120 seconds: remove it",
    "scheduler": "products take 20 ms and inference four fifths: remove it",
}


def toml_table(header: str, **entries: object) -> str:
    """The text of a table of strings, paths, numbers, booleans and lists; without the header if that is empty."""
    # such JSON is TOML
    lines = [f"{key} = {json.dumps(value, default=str, ensure_ascii=False)}" for key, value in entries.items()]
    return "\n".join([*([header] if header else []), *lines, ""])


def load_toml(path: Path, kind: type[T], *, made_by: str, whole: bool = False) -> T:
    """Read a TOML file into a typed, closed structure. Fields of type `Path` are relative to the file. `made_by` is
    the command that writes such a file, for the message about a missing file. `whole`: refuse a file that ends in the
    middle of a line: half a file may be a valid one, with fewer limits. Raises `ConfigError`: the file cannot be read,
    or has an unknown, missing or wrong entry."""
    try:
        text = decode_text(read_limited(path, MAX_BYTES), name=str(path))
        if whole and not text.endswith("\n"):
            raise ConfigError(
                f"{path} ends in the middle of a line: if it was cut short, write it again; if not, end it with a line "
                f"break"
            )
        data: dict[str, Any] = tomllib.loads(text)
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist; check the path, or write the file with `{made_by}`") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}") from error
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        twice = "; put all settings of a section under one header" if "Cannot declare" in str(error) else ""
        raise ConfigError(f"{path} cannot be read: {error}{twice}") from error

    def relative(kind: type, value: object) -> Path:
        if kind is Path and isinstance(value, str) and "\0" not in value:
            try:
                return path.parent / Path(value).expanduser()
            except RuntimeError as error:
                raise ValueError(f"{value!r}: there is no such home folder") from error
        raise ValueError("expected a path in quotes")

    try:
        return msgspec.convert(data, kind, dec_hook=relative)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{path}: {error}{_allowed(kind, str(error))}") from error


def _allowed(kind: type, message: str) -> str:
    """The known fields or values, as text for a message, at the place where msgspec found an unknown one; "" for other
    messages. msgspec's message ends with the place, as in "at `$.tenants[...]`", except at the top of the file."""
    if "unknown field" not in message and "Invalid enum value" not in message:
        return ""
    place = message.rpartition(" at `$")[2] if " at `$" in message else ""
    found = _alternatives(inspect.type_info(kind))
    for name in re.findall(r"\.(\w+)|\[", place):  # of a struct's field; empty for an item
        inner = [field.type for one in found for field in getattr(one, "fields", ()) if field.encode_name == name]
        inner += [one.value_type for one in found if isinstance(one, inspect.DictType)]
        inner += [one.item_type for one in found if isinstance(one, inspect.ListType | inspect.VarTupleType)]
        found = [alternative for one in inner for alternative in _alternatives(one)]
    if "unknown field" in message:
        names = [one.encode_name for struct in found if isinstance(struct, inspect.StructType) for one in struct.fields]
        unknown = message.split("`")[1]
        if unknown in _GONE:
            return f"; {_GONE[unknown]}"
        close = get_close_matches(unknown, names, n=1)
        return f"; {''.join(f'did you mean {one}? ' for one in close)}known are {', '.join(names)}"
    values = [value for one in found if isinstance(one, inspect.LiteralType) for value in one.values]
    return f"; choose one of {', '.join(map(repr, values))}"


def _alternatives(kind: inspect.Type) -> list[inspect.Type]:
    return list(kind.types) if isinstance(kind, inspect.UnionType) else [kind]
