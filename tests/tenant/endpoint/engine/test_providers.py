"""The engine over real providers in processes of their own, with masked rows."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from symbiosis_priv.errors import DeadlineExceededError
from symbiosis_priv.harness.local import LocalFederation
from tenant import RemoteConfig, backend_of
from tenant.endpoint.engine.continuous import ContinuousEngine, EngineLimits
from tenant.endpoint.engine.packed_model import PackedModel
from tenant.endpoint.engine.requests import Sampling, ShownRow
from tenant.model.ledger import ledger_of, since
from tenant.model.loading import load_language_model
from tenant.session.tally import Ledger
from tenant.tasks import Tasks
from tests.tenant.endpoint.engine.conftest import NAMES, Asked

ADAPTERS = [None, *NAMES]
GROUPS = 8  # layer groups: 4 in each of 2 blocks; the head is tied and stays with the tenant
PROMPT = tuple(range(5, 25))
DEADLINE_S = 3.0


@pytest.fixture(scope="module")
def federation(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalFederation]:
    directory = tmp_path_factory.mktemp("federation")
    options = {"executor": {"threads": 1}}
    with LocalFederation(checkpoint, directory, executors=2, provider_options=options) as federation:
        yield federation


Opened = tuple[ContinuousEngine, Any]


@pytest.fixture(scope="module")
def open_engine(checkpoint: Path, tokenizer: Any, adapters: Path) -> Iterator[Callable[..., Opened]]:
    """`open_engine(remote)`: an engine with all adapters and its model, closed after the tests."""
    opened = []

    def open_engine(remote: RemoteConfig) -> Opened:
        model = load_language_model(checkpoint, remote=remote, dtype=torch.float32)
        tasks = Tasks(model)
        tasks.register_all(adapters)
        limits = EngineLimits(step_rows=512)
        engine = ContinuousEngine(PackedModel(model, tasks), tokenizer, limits=limits)
        opened.append((engine, model))
        return engine, model

    yield open_engine
    for engine, model in opened:
        engine.close()
        backend_of(model).close()


@pytest.fixture(scope="module")
def remote(federation: LocalFederation) -> RemoteConfig:
    return RemoteConfig(federation=federation.federation, masking="pad", deadline_s=DEADLINE_S)


@pytest.fixture(scope="module")
def split(open_engine: Callable[..., Opened], remote: RemoteConfig) -> Opened:
    return open_engine(remote)


def ask_32(engine: ContinuousEngine) -> list[Asked]:
    """32 requests of 8 adapters, greedy and sampled ones mixed."""
    return [
        Asked(
            engine,
            tuple(range(3 + i, 13 + i + i % 5)),
            adapter=ADAPTERS[i % 8],
            client=str(i % 3),
            max_tokens=3 + i % 4,
            sampling=Sampling(temperature=i % 2 * 0.8, seed=i, logprobs=2),
        )
        for i in range(32)
    ]


def test_32_streams_over_8_adapters_are_those_of_the_simulation_and_each_request_has_its_ledger(
    split: Opened, open_engine: Callable[..., Opened]
) -> None:
    engine, model = split
    before, steps = ledger_of(model) or Ledger(), engine.load().steps
    asked = ask_32(engine)
    ledgers = [one.done().ledger for one in asked]
    spent = since(before, ledger_of(model) or Ledger())

    steps = engine.load().steps - steps
    assert steps <= 6 + 2  # round trips of the longest answer; the first requests may begin a step before the others
    assert spent.executor_round_trips == steps * GROUPS
    assert max(ledger.round_trips for ledger in ledgers) <= spent.executor_round_trips
    assert sum(ledger.rows for ledger in ledgers) == spent.rows
    assert sum(ledger.answers_verified for ledger in ledgers) == spent.answers_verified == spent.rows
    assert all(ledger.rows > 0 and ledger.bytes_up > 0 and ledger.bytes_down > 0 for ledger in ledgers)

    reference, _ = open_engine(RemoteConfig(masking="simulate"))
    assert [one.logprobs for one in asked] == [one.logprobs for one in ask_32(reference)]


def test_a_row_is_shown_as_the_executor_saw_it_and_never_a_row_of_another_request(
    open_engine: Callable[..., Opened], remote: RemoteConfig
) -> None:
    sent = list[list[int]]()

    class Tap:
        def received(self, *_: Any) -> None:
            pass

        def sent(self, peer: Any, message: Any, payload: Any) -> None:
            if peer.role == "executor" and payload is not None:
                sent.extend(payload.tolist())

    engine, model = open_engine(replace(remote, wiretap=Tap()))

    def is_of(row: ShownRow | None, token: int) -> bool:
        """Whether the row is the first layer group's input for a token, rounded to integers."""
        assert row is not None
        norm, table = model.model.layers[0].input_layernorm, model.get_input_embeddings()
        x, hidden = norm(table(torch.tensor([token])))[0].double(), torch.tensor(row.hidden).double()
        scale = (x @ hidden) / (hidden @ hidden)
        return bool((x - scale * hidden).abs().max() <= 0.51 * scale)

    alone = Asked(engine, PROMPT, max_tokens=6, shows_row=True)
    row = alone.done().row
    assert is_of(row, alone.tokens[-2])  # the last token is not computed
    assert row is not None
    assert row.hidden != row.saw
    assert list(row.saw) in sent
    assert max(map(abs, row.saw)) > 1 << 30
    assert Asked(engine, PROMPT, max_tokens=6).done().row is None

    others = list[Asked]()

    def join() -> None:
        others.append(Asked(engine, PROMPT, max_tokens=4, adapter="lora", client="other", shows_row=True))

    first = Asked(engine, PROMPT, max_tokens=12, shows_row=True, at={2: join})
    assert is_of(first.done().row, first.tokens[-2])
    assert others[0].done().row is None  # every pass had rows of both


def test_streams_survive_executors_that_die_and_without_one_get_an_error(
    split: Opened, federation: LocalFederation
) -> None:
    engine, _ = split
    right = Asked(engine, PROMPT, max_tokens=8).tokens

    def swap() -> None:
        federation.restart("executor-1")
        federation.kill("executor-2")

    kill = {2: lambda: federation.kill("executor-1"), 5: swap}
    asked = [Asked(engine, PROMPT, max_tokens=8, at=kill), Asked(engine, PROMPT, adapter="lora", max_tokens=8)]
    assert [len(one.tokens) for one in asked] == [8, 8]
    assert asked[0].tokens == right

    lost = Asked(engine, PROMPT, max_tokens=8, at={2: lambda: federation.kill("executor-1")})
    assert isinstance(lost.error(), DeadlineExceededError)
    federation.restart("executor-1")
    assert Asked(engine, PROMPT, max_tokens=8).tokens == right
