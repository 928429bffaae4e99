"""Reads `provider.toml`, and writes a template of it."""

import inspect
import json
import re
import textwrap
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from provider.config.schema import DEFAULT_LISTEN, ProviderConfig
from symbiosis_priv.certificates.naming import check_name
from symbiosis_priv.errors import ConfigError
from symbiosis_priv.limits import Role
from symbiosis_priv.network.addresses import parse_address
from symbiosis_priv.system.toml import load_toml


def load(path: str | Path, *, whole: bool = False) -> ProviderConfig:
    """Read a provider.toml; relative paths are relative to the file. With `whole`, refuse a file that ends in the
    middle of a line: half a file may be a valid one, with fewer limits. Raises `ConfigError`: unreadable, an unknown or
    missing key, a value out of its range; the message names the key."""
    path = Path(path)
    config = load_toml(path, ProviderConfig, made_by="symbiosis-priv provider init", whole=whole)
    if config.usage.database is None:
        usage = msgspec.structs.replace(config.usage, database=path.with_suffix(".usage.sqlite"))
        config = msgspec.structs.replace(config, usage=usage)
    try:
        folder = path.parent / Path(config.model.checkpoint).expanduser()
        if not folder.is_dir():  # a name on the hub; if not, `checkpoint.resolve` reports the error
            return config
    except (RuntimeError, OSError) as error:  # no such home folder; a folder that this user may not enter
        raise ConfigError(f"{path}: checkpoint = {config.model.checkpoint!r} cannot be read: {error}") from error
    model = msgspec.structs.replace(config.model, checkpoint=str(folder.resolve()))
    return msgspec.structs.replace(config, model=model)


def template(
    *,
    name: str = "alpha",
    roles: Sequence[Role] = ("executor",),
    checkpoint: str = "model",
    layers: str | None = None,
    listen: str = DEFAULT_LISTEN,
    public_address: str | None = None,
    revoked: str | None = None,
) -> str:
    """A provider.toml with these values. Every other key is commented out, with its default or an example. Metrics are
    on, at a loopback address. The explanations come from the docstrings in `provider.config.schema`. Tenants reach the
    provider at `public_address`, or else at `listen`. Raises `ConfigError`: a value that provider.toml does not
    allow."""
    check_name(name)  # prefix of the name of the certificate and of its key
    port = parse_address(listen)[1] + _METRICS_PORT - parse_address(DEFAULT_LISTEN)[1]  # each provider has its own
    given = {
        "name": name,
        "listen": listen,
        "roles": roles,
        "model.checkpoint": checkpoint,
        "model.layers": layers,
        "tls.certificate": f"keys/{name}.pem",
        "tls.key": f"keys/{name}.key",
        "tls.tenant_authority": "keys/authority.pem",
        "tls.revoked": revoked,
        "registry.address": public_address,
        "metrics.listen": f"127.0.0.1:{port if not listen.endswith(':0') and port < 1 << 16 else 0}",
    }
    text = _HEAD + _keys(ProviderConfig, "", given)
    for field in msgspec.structs.fields(ProviderConfig):
        if isinstance(field.type, type) and issubclass(field.type, msgspec.Struct):
            about = inspect.cleandoc(field.type.__doc__ or "").partition("\n\nArgs:")[0]
            text += f"\n\n{_comment(about)}[{field.name}]\n{_keys(field.type, f'{field.name}.', given)}"
        elif field.name == "tenants":
            text += _TENANTS
    try:
        msgspec.convert(tomllib.loads(text), ProviderConfig, dec_hook=lambda kind, value: kind(value))
    except msgspec.ValidationError as error:
        raise ConfigError(str(error)) from error
    return text


def _keys(config: type[msgspec.Struct], section: str, given: Mapping[str, object]) -> str:
    """Every key of a section below its explanation; commented out unless a value is given."""
    arguments = inspect.cleandoc(config.__doc__ or "").partition("Args:\n")[2]
    text = ""
    for name, explanation in re.findall(r"^    (\w+): (.*(?:\n {8}.*)*)", arguments, re.MULTILINE):
        field = next(field for field in msgspec.structs.fields(config) if field.name == name)
        key, mark = section + name, "#"
        value = _EXAMPLES.get(key, field.default)
        if given.get(key) is not None:
            value, mark = given[key], ""
        text += f"\n{_comment(explanation)}{mark}{field.encode_name} = {_toml(value)}\n"
    return text


def _toml(value: object) -> str:
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_toml, value))}]"
    return json.dumps(value, ensure_ascii=False)


def _comment(text: str) -> str:
    return textwrap.fill(" ".join(text.split()), 100, initial_indent="# ", subsequent_indent="# ") + "\n"


_METRICS_PORT = 9464  # the usual port of such metrics, for the default address
_HEAD = """\
# symbiosis-priv provider serve --config provider.toml
# Paths are relative to this file. What is commented out shows its default, or an example where there is none.
"""
_TENANTS = """
# One tenant's own limits; also [tenants."alice@sha256:0123456789abcdef"].
#[tenants.alice]
#weight = 2.0
"""
_EXAMPLES = tomllib.loads(Path(__file__).with_name("examples.toml").read_text(encoding="utf-8"))
