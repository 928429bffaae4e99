"""A tenant of an executor whose ranks have a gateway each: the bits of the simulation, masked and not."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from transformers import AutoModelForCausalLM

from provider.gateway.usage import read
from symbiosis_priv.harness.local import METRICS, LocalFederation
from tenant import RemoteConfig, backend_of
from tests.experts import two_steps
from tests.waiting import until

IDS = torch.arange(3, 3 + 2 * 11).view(2, 11)


class Ranks(NamedTuple):
    local: LocalFederation
    both: Path
    second: Path


@pytest.fixture(scope="module", params=["columns", "gathered"])
def ranks(llama: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Ranks]:
    """A helper, and an executor of two ranks with a gateway each, as `provider serve` starts them. The files are the
    federation.toml with the addresses of both ranks, and one with that of rank 1."""
    executor = {"threads": 1, "ranks": 2, "gateways": "all", "warm_up": False, "sharding": request.param}
    options: dict[str, dict[str, object]] = {"executor": executor, "metrics": METRICS}
    with LocalFederation(llama, tmp_path_factory.mktemp("ranks"), provider_options=options) as local:
        second = local.directory / "rank 1.toml"
        text = local.federation.read_text(encoding="utf-8")
        second.write_text(text.replace(f'"{local.address("executor")}", ', ""), encoding="utf-8")
        yield Ranks(local, local.federation, second)


def trained(path: Path, **options: Any) -> list[torch.Tensor]:
    """The losses and every tensor of two steps of training, and tokens."""
    config = RemoteConfig(**options)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, quantization_config=config)
    torch.manual_seed(1)
    found = two_steps(model, IDS)
    found.append(model.eval().generate(input_ids=IDS, max_new_tokens=3, do_sample=False, pad_token_id=0))
    if "federation" in options:
        backend_of(model).close()
    return found


@pytest.mark.parametrize("masking", ["pad", "none"])
def test_training_and_tokens_have_the_bits_of_the_simulation(llama: Path, ranks: Ranks, masking: str) -> None:
    """First at rank 1 only, and then at both ranks: no row of a tenant of rank 1 is counted at the gateway of rank 0,
    and the bill is one."""
    expected = trained(llama, masking="simulate")
    assert len(expected) > 3
    before = ranks.local.status("executor")

    def settled() -> bool:
        bills = [row for row in read(ranks.both.with_name("executor.usage.sqlite")) if row["role"] == "executor"]
        rows = sum(int(each["rows"]) for each in ranks.local.status("executor")["gateways"])
        return [int(bill["rows"]) for bill in bills] == [rows]

    for federation in (ranks.second, ranks.both):
        found = trained(llama, masking=masking, federation=federation)
        assert all(map(torch.equal, found, expected))
        until(settled, within_s=20)
        if federation is ranks.second:
            after = ranks.local.status("executor")
            assert after["visits"] == before["visits"]  # no connection was opened at rank 0
            assert after["gateways"][0]["rows"] == before["gateways"][0]["rows"]
            assert after["gateways"][1]["rows"] > before["gateways"][1]["rows"]
