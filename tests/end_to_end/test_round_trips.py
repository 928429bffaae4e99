"""Two round trips for a block at real providers: the bits of the simulation, both rows under way at the same time."""

import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import AutoModelForCausalLM

from symbiosis_priv.checkpoints.layers import Scope
from symbiosis_priv.checkpoints.manifest import while_decoding
from symbiosis_priv.errors import CheckpointError, ConfigError, SymbiosisError
from symbiosis_priv.federation import Peer
from symbiosis_priv.harness.local import METRICS, LocalFederation
from symbiosis_priv.network import wire
from tenant import RemoteConfig, backend_of
from tenant.model.ledger import ledger_of
from tests.cases import cases
from tests.waiting import until

IDS = torch.arange(3, 10).view(1, 7)
DEADLINE_S = 60.0
TOKENS = 5


@pytest.fixture(scope="module")
def served(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalFederation]:
    """Two executors, each with one of two blocks: a composed group and the group after it are at different ones."""
    with LocalFederation(
        llama,
        tmp_path_factory.mktemp("two"),
        executors=2,
        helpers=2,
        layers={"executor-1": "0", "executor-2": "1"},
        scope=Scope(round_trips=2),
        provider_options={"executor": {"threads": 1}, "metrics": METRICS},
    ) as federation:
        yield federation


def loaded(path: Path, **options: Any) -> Any:
    config = RemoteConfig(**{"deadline_s": DEADLINE_S} | options)
    return AutoModelForCausalLM.from_pretrained(path, quantization_config=config)


def outputs(model: Any) -> list[Tensor]:
    """Logits of a decoded text, without and with an adapter at every linear, and the loss and gradients of a step."""
    found = []
    for adapted in (False, True):
        if adapted:
            torch.manual_seed(2)
            lora = LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear", r=2, init_lora_weights=False)
            model = get_peft_model(model, lora)
        made = model.generate(
            input_ids=IDS, max_new_tokens=TOKENS, do_sample=False, output_logits=True, return_dict_in_generate=True
        )
        found += [*made.logits]
    loss = model(input_ids=IDS, labels=IDS).loss
    loss.backward()
    found += [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]
    backend_of(model).close()
    return found


@cases(__file__, "options")
def test_the_bits_are_those_of_the_simulation(llama: Path, served: LocalFederation, options: dict[str, Any]) -> None:
    expected = outputs(loaded(llama, masking="simulate", round_trips=2, ring_bits=options["ring_bits"]))
    found = outputs(loaded(llama, federation=served.federation, **options))
    assert len(found) == len(expected) > 2 * TOKENS
    assert all(torch.equal(mine, its) for mine, its in zip(found, expected, strict=True))


class _Meeting:
    """A wiretap that lets a row of a composed group leave together with the row of the group after it only."""

    def __init__(self, together: set[int]) -> None:
        self._together, self._barrier = together, threading.Barrier(2)
        self.requests = Counter[int]()
        self._lock = threading.Lock()

    def sent(self, peer: Peer, message: wire.Message, payload: Tensor | None) -> None:
        if not isinstance(message, wire.Execute):
            return
        with self._lock:
            self.requests[message.group] += 1
        if message.group in self._together:
            self._barrier.wait(DEADLINE_S)

    def received(self, peer: Peer, message: wire.Message, payload: Tensor | None) -> None:
        pass


def billed(served: LocalFederation, name: str) -> int:
    """The rows and multiply-adds on both executors' bills."""
    bills = [bill for number in (1, 2) for bill in served.status(f"executor-{number}")["tenants"]]
    return sum(bill["counts"][name] for bill in bills if bill["role"] == "executor")


def test_a_token_waits_half_as_often_and_is_billed(llama: Path, served: LocalFederation) -> None:
    together = set[int]()
    tap = _Meeting(together)
    before = {name: billed(served, name) for name in ("rows", "work")}
    model = loaded(llama, federation=served.federation, wiretap=tap)
    groups = {facts.entry.members: index for index, facts in enumerate(backend_of(model).facts)}
    ordinary = sum("@" not in members[0] for members in groups)
    for members, index in groups.items():
        if "@" in members[0]:
            together |= {index, groups[tuple(member.partition("@")[0] for member in members[1:])]}
    model.generate(input_ids=IDS, max_new_tokens=TOKENS, do_sample=False)
    ledger, entries = ledger_of(model), [facts.entry for facts in backend_of(model).facts]
    backend_of(model).close()
    assert ledger is not None
    rows = dict.fromkeys(while_decoding(entries), IDS.shape[1] + TOKENS - 1)
    rows[entries[-1]] = TOKENS  # the LM head
    assert ledger.rows == sum(rows.values())
    multiply_adds = sum(count * entry.inputs * entry.stacked_outputs for entry, count in rows.items())
    until(lambda: billed(served, "rows") - before["rows"] == ledger.rows, within_s=DEADLINE_S)
    assert billed(served, "work") - before["work"] == multiply_adds
    met = sum(tap.requests[index] for index in together)
    blocks = 2
    assert tap.requests.total() == TOKENS * ordinary
    assert tap.requests.total() - met // 2 == TOKENS * (2 * blocks + 2)  # instead of 4 * blocks + 1, with the head


def test_what_does_not_fit_is_refused(
    llama: Path, served: LocalFederation, llama_federation: LocalFederation, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="round_trips = 2 under"):
        loaded(llama, federation=llama_federation.federation, round_trips=2)
    text = llama_federation.federation.read_text()
    digest, theirs = (
        f.federation.read_text().partition('digest = "')[2].partition('"')[0] for f in (served, llama_federation)
    )
    wrong = llama_federation.directory / "two.toml"
    wrong.write_text(text.replace("round_trips = 4", "round_trips = 2"))
    with pytest.raises(CheckpointError, match="round_trips"):  # the digest of a model without composed groups
        loaded(llama, federation=wrong, cache=tmp_path)
    backend_of(loaded(llama, federation=llama_federation.federation)).close()  # prepares that model
    with pytest.raises(ConfigError, match="no composed groups; correct round_trips or digest"):
        loaded(llama, federation=wrong)
    wrong.write_text(text.replace("round_trips = 4", "round_trips = 2").replace(theirs, digest))
    model = loaded(llama, federation=wrong)  # no provider is asked yet
    with pytest.raises(SymbiosisError, match=theirs):
        model(input_ids=IDS)
