"""Effects of rows for single experts are relayed like any others."""

from pathlib import Path

import pytest
import torch

from symbiosis_priv.arithmetic.keystream import expand, mask_key, relay_key
from symbiosis_priv.checkpoints.weights import WeightStore
from tests.experts import write
from tests.provider.relay.conftest import NewTenant
from tests.provider.relay.test_relay import ring_rows
from tests.stacks import expert_product, stacks_of


@pytest.fixture(scope="module")
def store(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> WeightStore:
    path = write("Mixtral", tmp_path_factory.mktemp("mixtral"), intermediate_size=64, num_hidden_layers=1)
    return WeightStore(path, cache=cache)


def test_blocks_of_experts_have_keystreams_of_their_own(new_tenant: NewTenant, store: WeightStore) -> None:
    tenant, counts = new_tenant(), (2, 0, 1, 3)
    for group, entry in list(stacks_of(store).items())[:2]:
        effect = tenant.relay(group, 6, counts=counts, first_row=5)
        inputs, outputs = entry.by_expert.columns("forward")
        rows = ring_rows(6, inputs)
        reply, answer = tenant.product(rows, effect)
        assert reply.relayed
        name = {"group_name": entry.by_expert.name, "direction": "forward"}
        mask = expand(mask_key(tenant.seed, **name), first_row=5, rows=6, width=inputs)
        hiding = expand(relay_key(tenant.seed, **name), first_row=5, rows=6, width=outputs)
        weight = store.group(group).weight
        assert torch.equal(answer + hiding, expert_product(weight, counts, rows - mask, "forward", entry.joined))
