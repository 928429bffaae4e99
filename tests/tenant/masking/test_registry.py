"""One place lists the schemes; a new scheme is a module and its registration."""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest
import torch
from hypothesis import given, strategies as st

from symbiosis_priv.arithmetic.ring import DIRECTIONS, FORWARD, RANGE, Bound, quantise_rows
from symbiosis_priv.checkpoints.weights import WeightStore
from symbiosis_priv.errors import ConfigError, RoleConflictError
from symbiosis_priv.harness import strategies as testing
from symbiosis_priv.limits import GroupIndex
from tenant import RemoteConfig
from tenant.cli.options import MASKING_ROLES, Masking
from tenant.core.pads import EffectSource
from tenant.masking.registry import LocalSource, register, registered, scheme_named, session_scheme, unregister
from tenant.masking.scheme import Materials, SessionScheme
from tenant.model.connect import open_backend
from tenant.preparation.prepared import Preparation
from tests.tenant.conftest import NewFederation, NewSession
from tests.tenant.scripted import ScriptedProvider
from threat_model.evidence.schemes import SCHEMES, variant

ROOT = Path(__file__).parents[3]


class Borrowed(SessionScheme):
    """Pads from the tenant's own weights; a quarter of the range is reserved for an error that is always 0."""

    name = "borrowed"
    summary = "nobody"
    roles = frozenset({"executor"})
    own_weights = True
    hides_from = frozenset({"executor"})
    assumption = "none"
    headroom_bits = 2

    def effects(self, materials: Materials) -> EffectSource:
        assert materials.store is not None
        return LocalSource(materials.facts, materials.secret, materials.store)


@pytest.fixture
def borrowed() -> Iterator[Borrowed]:
    scheme = Borrowed()
    register(scheme)
    yield scheme
    unregister(scheme.name)


def test_a_registered_scheme_works_everywhere_by_its_name(
    borrowed: Borrowed,
    executor: ScriptedProvider,
    new_federation: NewFederation,
    federation_file: object,
    store: WeightStore,
    tmp_path: Path,
) -> None:
    assert callable(federation_file)
    path = federation_file(new_federation([executor]))
    config = RemoteConfig(federation=path, masking="borrowed", cache=tmp_path / "cache", deadline_s=20)
    rows = torch.randn(5, 64, generator=torch.Generator().manual_seed(0))
    with_room = open_backend(config, store.path)
    plain = open_backend(RemoteConfig(masking="simulate"), store.path)
    try:
        got, exact = with_room.linear(0, FORWARD, rows), plain.linear(0, FORWARD, rows)
    finally:
        with_room.close()
        plain.close()
    assert torch.allclose(got, exact, atol=1e-2)
    assert not torch.equal(got, exact)  # scaled to a quarter: other bits
    assert variant(borrowed).hides_from >= {"executor", "network"}
    assert variant(borrowed).helpers == 0


@given(data=st.data(), bits=st.integers(0, 6), width=st.integers(1, 40))
def test_headroom_stays_unused(data: st.DataObject, bits: int, width: int) -> None:
    weight = torch.randint(-511, 512, (7, width), generator=torch.Generator().manual_seed(width))
    norm = float(weight.double().square().sum(1).sqrt().max())
    bound = Bound(width, int(weight.abs().max()), norm).with_headroom(bits)
    x = data.draw(testing.float_rows(width=width, count=3, dtypes=[torch.float32], largest=1e6))
    xq, _ = quantise_rows(x, bound)
    assert int((xq.long() @ weight.t()).abs().max()) < RANGE >> bits


def test_names_are_unique_and_mistakes_list_them(borrowed: Borrowed) -> None:
    with pytest.raises(ConfigError, match="'borrowed' is registered already"):
        register(Borrowed())
    with pytest.raises(ConfigError, match="choose one of pad, local, none, paper-pool, simulate, borrowed"):
        scheme_named("lwe")
    with pytest.raises(ConfigError, match="'simulate' does not run over a session"):
        session_scheme("simulate")


def test_a_session_uses_the_roles_of_its_scheme(
    executor: ScriptedProvider, helper: ScriptedProvider, new_session: NewSession, preparation: Preparation
) -> None:
    with pytest.raises(RoleConflictError, match="masking = 'pad' needs"):
        new_session("pad", [executor])
    session = new_session("local", [executor], [helper])
    for direction in DIRECTIONS:
        session.product(
            GroupIndex(0), direction, torch.ones(2, preparation.facts[0].inputs(direction), dtype=torch.int32)
        )
    assert executor.executed
    assert helper.hellos == []


def test_the_attacks_cover_every_scheme_that_shows_anything_to_a_provider() -> None:
    assert {scheme.family for scheme in SCHEMES} == {scheme.name for scheme in registered() if scheme.roles}


def test_the_command_line_names_them_all() -> None:
    assert list(get_args(Masking)) == [scheme.name for scheme in registered()]
    assert {scheme.name: scheme.roles for scheme in registered()} == MASKING_ROLES


def compares_masking(node: ast.AST) -> bool:
    """A comparison with the name `masking`."""
    if not isinstance(node, ast.Compare):
        return False
    names = (getattr(side, "id", getattr(side, "attr", None)) for side in (node.left, *node.comparators))
    return "masking" in names and isinstance(node.ops[0], ast.Eq | ast.NotEq | ast.In | ast.NotIn)


def test_no_other_module_decides_by_a_schemes_name() -> None:
    assert compares_masking(ast.parse("config.masking == 'pad'", mode="eval").body)
    for package in ("tenant", "threat_model", "symbiosis_priv", "provider"):
        for path in (ROOT / package).rglob("*.py"):
            if "masking" in (source := path.read_text(encoding="utf-8")):  # parsing takes longer than searching
                assert not any(map(compares_masking, ast.walk(ast.parse(source)))), path
