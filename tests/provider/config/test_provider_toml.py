"""The template of provider.toml loads, and its commented values are the defaults."""

import re
from pathlib import Path

import msgspec
import pytest

from provider.config.provider_toml import load, template
from provider.config.schema import Limits, ProviderConfig, from_json, to_json
from symbiosis_priv.errors import ConfigError
from tests.cases import cases

NO_DEFAULT = (
    *("cache", "layers", "devices", "threads", "revoked", "requests_per_s", "rows_per_s", "giga_"),
    *("weight =", "database", "float_memory_mib =", 'listen = "127.0.0.1:9464', "hosts ="),
    *("announce =", "authority =", "address =", "to =", "from ="),
)


def written(folder: Path, text: str) -> Path:
    path = folder / "provider.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_template_shows_the_defaults(tmp_path: Path) -> None:
    """Uncommenting every default of the template changes no setting that has a default."""
    (tmp_path / "model").mkdir()
    plain = load(written(tmp_path, template()))
    lines = []
    for line in template().splitlines():
        shown = line.removeprefix("#")
        optional = re.match(r"#\w+ = ", line) and not shown.startswith(NO_DEFAULT)
        lines.append(shown if optional else line)
    assert load(written(tmp_path, "\n".join(lines))) == plain
    assert plain.limits == Limits()
    assert plain.model.checkpoint == str((tmp_path / "model").resolve())
    assert plain.tls.certificate == tmp_path / "keys/alpha.pem"


def test_template_explains_every_key() -> None:
    """A key without an explanation in its docstring would be missing in the template."""
    written = re.findall(r"^# .*\n#?(\w+) = ", template(), re.MULTILINE)
    for field in msgspec.structs.fields(ProviderConfig):
        if isinstance(field.type, type) and issubclass(field.type, msgspec.Struct):
            assert {each.encode_name for each in msgspec.structs.fields(field.type)} <= set(written)
            assert f"\n[{field.name}]\n" in template()
        else:
            assert field.name in (*written, "tenants")


@pytest.mark.parametrize("layers", ["0-15", "7", None])
def test_a_template_names_the_layers(layers: str | None, tmp_path: Path) -> None:
    assert load(written(tmp_path, template(layers=layers))).model.layers == layers


@cases(__file__, "bad_templates")
def test_a_template_with_bad_values_is_refused(layers: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        template(layers=layers)


# provider.toml: every mistake names its key, and a configuration can be sent to another process


MINIMAL = """
name = "alpha"
[model]
checkpoint = "model"
[tls]
certificate = "alpha.pem"
key = "alpha.key"
tenant_authority = "authority.pem"
"""


def test_other_keys_are_optional(tmp_path: Path) -> None:
    config = load(written(tmp_path, MINIMAL))
    assert config.roles == ("executor",)
    assert config.model.checkpoint == "model"  # no such folder, so it is a name on the hub
    assert from_json(to_json(config)) == config


@cases(__file__, "mistakes")
def test_mistakes_are_named(
    tmp_path: Path, before: str | None, after: str | None, replaced: str | None, by: str | None, named: str
) -> None:
    text = f"{before or ''}\n{MINIMAL}{after or ''}"
    text = text.replace(replaced, by or "") if replaced else text
    with pytest.raises(ConfigError, match=named):
        load(written(tmp_path, text))


def test_half_a_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"provider\.toml"):
        load(written(tmp_path, "name ="))


def test_child_configuration_is_checked() -> None:
    with pytest.raises(ConfigError):
        from_json(b"{}")
