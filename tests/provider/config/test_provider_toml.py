"""The template of provider.toml loads, and its commented values are the defaults."""

import re
from pathlib import Path

import msgspec
import pytest

from provider.config.provider_toml import load, template
from provider.config.schema import Limits, ProviderConfig
from symbiosis_priv.errors import ConfigError

NO_DEFAULT = (
    *("cache", "layers", "threads", "revoked", "requests_per_s", "rows_per_s", "giga_", "max_rows_in_flight"),
    *("weight =", "database", 'listen = "127.0.0.1:9464', "hosts ="),
    *("announce =", "authority =", "address =", "capacity_layers", "to =", "from ="),
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


@pytest.mark.parametrize(
    ("layers", "words"),
    [("15-0", "layers 15-0 is not a range"), ("all", "not a range of layers"), ("auto", "capacity_layers")],
)
def test_a_template_with_bad_values_is_refused(layers: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        template(layers=layers)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        load(tmp_path / "none.toml")
