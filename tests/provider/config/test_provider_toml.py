"""The template of provider.toml loads, and its commented values are the defaults."""

import re
from pathlib import Path

import msgspec
import pytest

from provider.config.provider_toml import load, template
from provider.config.schema import Limits, ProviderConfig, from_json, to_json
from symbiosis_priv.errors import ConfigError

NO_DEFAULT = (
    *(
        "cache",
        "layers",
        "devices",
        "threads",
        "revoked",
        "requests_per_s",
        "rows_per_s",
        "giga_",
    ),
    *("weight =", "database", "float_memory_mib =", 'listen = "127.0.0.1:9464', "hosts ="),
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


def test_paths_of_relays_are_relative_to_the_file(tmp_path: Path) -> None:
    relay = '[relay]\nto = [{ address = "a.example:1", certificate = "keys/a.pem" }]\nfrom = ["keys/b.pem"]'
    config = load(written(tmp_path, f'roles = ["executor", "helper"]\n{MINIMAL}{relay}'))
    assert config.relay.to[0].certificate == tmp_path / "keys/a.pem"
    assert config.relay.helpers == (tmp_path / "keys/b.pem",)
    assert from_json(to_json(config)) == config


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ("colour = 1\n" + MINIMAL, "colour"),
        (MINIMAL + "pin = 1", "pin"),
        (MINIMAL.replace('key = "alpha.key"', ""), "key"),
        (MINIMAL.replace('"alpha.key"', "3"), "key"),
        ('roles = ["boss"]\n' + MINIMAL, "roles"),
        ("roles = []\n" + MINIMAL, "roles"),
        ('listen = "nowhere"\n' + MINIMAL, "nowhere"),
        (MINIMAL + "[limits]\nmax_payload_mib = 0", "max_payload_mib"),
        (MINIMAL + "[limits]\nstop_timeout_s = -1.0", "stop_timeout_s"),
        (MINIMAL + "[limits]\nmax_payload_mib = 1000", "max_inflight_mib_per_tenant"),
        (MINIMAL + "[limits]\nmax_inflight_mib = 600", "max_inflight_mib"),
        (MINIMAL + '[executor]\nendpoint = "tcp://0.0.0.0:1"', "endpoint"),
        (MINIMAL + f'[executor]\nendpoint = "ipc:///{"x" * 100}"', "endpoint"),
        (MINIMAL + '[executor]\ngateways = "all"', "devices takes its place"),
        (MINIMAL + '[executor]\ndevices = "some"', "devices"),
        (MINIMAL + '[executor]\ndevices = ["cuda"]', "devices"),
        (MINIMAL + '[executor]\ndevices = ["cuda:1", "cuda:1"]', "has a card twice"),
        (MINIMAL + '[executor]\ndevices = "all"\nranks = 2', "exclude each other"),
        (MINIMAL + "[executor]\nprocesses = 2\nranks = 2", "exclude each other"),
        (MINIMAL + '[executor]\nprocesses = 2\nendpoint = "ipc:///run/a/b"', "exclude each other"),
        (MINIMAL + '[executor]\nprocesses = 2\ndevices = "all"', "exclude each other"),
        (MINIMAL + '[executor]\nprocesses = 2\ndevice = "cuda"', "write devices = 'all'"),
        (MINIMAL + "[executor]\nprocesses = 2\nfloat_memory_mib = 9", "remove .executor. float"),
        ('roles = ["executor", "helper"]\n' + MINIMAL + "[executor]\nprocesses = 2", "remove roles"),
        (MINIMAL + '[executor]\ndevices = "all"\n[relay]\nfrom = ["b.pem"]', "remove .relay. from"),
        (
            MINIMAL + '[executor]\ndevices = "all"\n[registry]\nannounce = ["r.example:1"]\nauthority = "a.pem"',
            "remove .registry. announce",
        ),
        (MINIMAL.replace("[tls]", "weight_bits = 40\n[tls]"), "weight_bits"),
        (MINIMAL + '[relay]\nto = [{ address = "alpha.example:1", certificate = "a.pem" }]', '"helper" to roles'),
        ('roles = ["helper"]\n' + MINIMAL + '[relay]\nfrom = ["b.pem"]', '"executor" to roles'),
        (
            'roles = ["helper"]\n' + MINIMAL + '[relay]\nto = [{ address = "alpha", certificate = "a.pem" }]',
            "host:port",
        ),
        (MINIMAL + "[relay]\nhelpers = []", "known are to, from, memory_mib"),
        (MINIMAL + '[registry]\nannounce = ["r.example:1"]', "announce needs authority"),
        (MINIMAL + '[registry]\nannounce = ["r.example"]\nauthority = "a.pem"', "not host:port"),
        (MINIMAL + '[registry]\nannounce = ["r.example:1"]\nauthority = "a.pem"\naddress = "here"', "not host:port"),
        (MINIMAL + "[registry]\ncapacity_layers = 0", "capacity_layers"),
        (
            'roles = ["helper"]\n' + MINIMAL + '[registry]\nannounce = ["r.example:1"]\nauthority = "a.pem"',
            "tenants choose their helpers by hand",
        ),
        (MINIMAL.replace("[tls]", 'layers = "auto"\n[tls]'), "capacity_layers"),
        ("name =", "provider.toml"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, change: str, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        load(written(tmp_path, change))


def test_child_configuration_is_checked() -> None:
    with pytest.raises(ConfigError):
        from_json(b"{}")
