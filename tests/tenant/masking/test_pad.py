"""One-time pads of one or several helpers: sent rows and opened answers are exact to the bit."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st

from symbiosis_priv.arithmetic.ring import Direction
from symbiosis_priv.checkpoints.weights import WeightStore
from symbiosis_priv.harness import strategies as testing
from symbiosis_priv.limits import GroupIndex
from tests.tenant.conftest import NewProvider, NewSession
from tests.tenant.scripted import product_of


@pytest.mark.parametrize(("listed", "k"), [(1, None), (2, None), (3, None), (3, 1), (3, 2), (4, 3)])
def test_the_sum_over_all_helpers_is_exact(
    new_session: NewSession, new_provider: NewProvider, store: WeightStore, listed: int, k: int | None
) -> None:
    """n = sum n_j masks every row, and e = sum e_j is its product: the opened answer has the plain product's bits.

    With `[pads] helpers = k`, k of the listed helpers share each pad, and the others get no request for it.
    """
    executor, helpers = new_provider(), [new_provider() for _ in range(listed)]
    session = new_session("pad", [executor], helpers, pad_helpers=k, pool_memory=0)
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
