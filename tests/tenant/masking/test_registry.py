"""One place lists the schemes; a new scheme is a module and its registration."""

import ast
import contextlib
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st

from symbiosis_priv.arithmetic.ring import DIRECTIONS, RANGE, Bound, Direction, Headroom, quantise_rows
from symbiosis_priv.checkpoints.weights import WeightStore
from symbiosis_priv.errors import ConfigError, RoleConflictError
from symbiosis_priv.federation import Federation, Peer, Registries
from symbiosis_priv.harness import strategies as testing
from symbiosis_priv.limits import GroupIndex
from tenant.cli.options import MASKING_ROLES, Masking
from tenant.masking.backend import _on_host
from tenant.masking.registry import registered, scheme_named, session_scheme
from tenant.preparation.prepared import Preparation
from tests.tenant.conftest import Scripted
from tests.tenant.scripted import product_of, ring_rows
from threat_model.evidence.schemes import SCHEMES

ROOT = Path(__file__).parents[3]


@given(data=st.data(), noise=st.integers(0, 64), error=st.integers(0, RANGE - 1 - (1 << 24)), width=st.integers(1, 40))
def test_headroom_stays_unused(data: st.DataObject, noise: int, error: int, width: int) -> None:
    weight = torch.randint(-511, 512, (7, width), generator=torch.Generator().manual_seed(width))
    norm = float(weight.double().square().sum(1).sqrt().max())
    bound = Bound(width, int(weight.abs().max()), norm).narrowed(32, Headroom(noise, error))
    x = data.draw(testing.float_rows(width=width, count=3, dtypes=[torch.float32], largest=1e6))
    xq, _ = quantise_rows(torch.cat([x, weight.float()]), bound)  # a row of the weight has the largest product
    worst = noise * weight.sign()  # for output o, the errors that add up are those with the signs of row o
    assert int(((xq.long()[:, None] + worst) @ weight.t()).abs().max()) < RANGE - error
    assert int(((xq.long()[:, None] - worst) @ weight.t()).abs().max()) < RANGE - error


def test_names_are_unique_and_mistakes_list_them() -> None:
    assert len({scheme.name for scheme in registered()}) == len(registered())
    with pytest.raises(ConfigError, match="choose one of pad, local, lwe, none, paper-pool, simulate"):
        scheme_named("fhe")
    with pytest.raises(ConfigError, match="'simulate' does not run over a session"):
        session_scheme("simulate")


def test_a_session_uses_the_roles_of_its_scheme(scripted: Scripted, preparation: Preparation) -> None:
    session = scripted.new_session("local", helpers=[scripted.helper])
    for direction in DIRECTIONS:
        session.product(GroupIndex(0), direction, ring_rows(preparation, 0, direction, 2))
    assert scripted.executor.executed
    assert scripted.helper.hellos == []


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


# A scheme's check of its promises with the given providers


EXECUTOR = Peer("alpha", "A", "executor", "alpha.example", 7401, Path("alpha.pem"))
HELPER = Peer("beta", "B", "helper", "beta.example", 7402, Path("beta.pem"))
ALONE = Federation("sha256:" + "0" * 64, 10, Path("t.pem"), Path("t.key"), (EXECUTOR, HELPER))


def test_executors_from_registries_see_no_unmasked_rows() -> None:
    """A scheme that needs a helper is refused without one."""
    found = replace(ALONE, registries=Registries(("r.example:7500",), Path("federation.pem")))
    without = replace(ALONE, peers=(EXECUTOR,))
    for scheme in (scheme for scheme in registered() if scheme.roles):
        scheme.check(ALONE)
        for file, fits, error, words in (
            (found, scheme.name in ("pad", "local", "lwe"), ConfigError, r"remove \[registry\]"),
            (without, "helper" not in scheme.roles, RoleConflictError, "needs a .* with role = 'helper'"),
        ):
            with contextlib.nullcontext() if fits else pytest.raises(error, match=words):
                scheme.check(file)


# One-time pads of one or several helpers: sent rows and opened answers are exact to the bit


@pytest.mark.parametrize(("listed", "k"), [(1, None), (2, None), (3, None), (3, 1), (3, 2), (4, 3)])
def test_the_sum_over_all_helpers_is_exact(scripted: Scripted, store: WeightStore, listed: int, k: int | None) -> None:
    """n = sum n_j masks every row, and e = sum e_j is its product: the opened answer has the plain product's bits. With
    `[pads] helpers = k`, k of the listed helpers share each pad, and the others get no request for it."""
    executor, helpers = scripted.new_provider(), [scripted.new_provider() for _ in range(listed)]
    session = scripted.new_session("pad", [executor], helpers, pad_helpers=k, pool_memory=0)
    entries = store.manifest().groups

    @settings(max_examples=25, suppress_health_check=list(HealthCheck))
    @given(st.integers(0, len(entries) - 1), testing.directions(), st.integers(1, 40), st.integers(0, 2**32))
    def check(index: GroupIndex, direction: Direction, count: int, seed: int) -> None:
        for provider in (executor, *helpers):
            provider.heard.clear()
        width, _ = entries[index].columns(direction)
        rows = torch.randint(-8, 9, (count, width), generator=torch.Generator().manual_seed(seed)).to(torch.int32)
        assert torch.equal(session.product(index, direction, rows), product_of(store, index, direction, rows))
        sent = torch.cat([heard.rows for heard in executor.executed])
        sharing = [helper for helper in helpers if helper.effects]
        assert len(sharing) == (k or listed)
        shares = [torch.cat([heard.rows for heard in helper.effects]) for helper in sharing]
        effects = [torch.cat([helper.product(heard) for heard in helper.effects]) for helper in sharing]
        mask = torch.stack(shares).sum(dim=0, dtype=torch.int32)
        assert torch.equal(sent - mask, rows)
        assert torch.equal(
            torch.stack(effects).sum(dim=0, dtype=torch.int32), product_of(store, index, direction, mask)
        )
        assert len({bytes(share.numpy().data) for share in shares}) == len(shares)

    check()


# Rows on a GPU are copied to the host and back through page-locked memory, with the same bits


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_copies_between_the_devices_wait_for_each_other() -> None:
    for _ in range(20):
        parts = [torch.randn(rows, 4096, device="cuda", requires_grad=True) for rows in (1, 700)]
        near = _on_host(parts)
        assert all(part.is_pinned() for part in near)
        assert all(torch.equal(here, there.detach().cpu()) for here, there in zip(near, parts, strict=True))
