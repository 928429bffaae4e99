"""A small `bench ranks`: a sharded executor loses a rank while a tenant sends requests."""

from pathlib import Path

import pytest

from tenant.bench.measured_models import Llama
from tenant.bench.report import number
from threat_model.availability.ranks import Sharding, measure_ranks


@pytest.mark.parametrize("gateways", [False, True], ids=["one gateway", "a gateway for each rank"])
def test_a_lost_rank_delays_no_tenant_that_has_another_executor(tmp_path: Path, gateways: bool) -> None:
    (row,) = measure_ranks(
        tmp_path,
        Llama(width=64, layers=1, inner=64),
        Sharding(ranks=2, tenants=1, rows=1, masking="none", seconds=2.0, pause_s=0.02, apart=False, gateways=gateways),
        groups=[2],
        losses=["a rank is killed"],
    )
    assert row["wrong"] == 0
    assert row["left_processes"] == 0
    assert row["named"] == "yes"
    assert number(row["longest_s"]) < number(row["back_after_s"])
