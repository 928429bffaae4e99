"""The engine that answers one request at a time."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from symbiosis_priv.errors import ConfigError, OverloadedError, TaskError
from tenant import RemoteConfig
from tenant.endpoint.engine.requests import Done, Embedded, Sampling, Started
from tenant.endpoint.engine.sequential import SequentialEngine
from tenant.model.loading import load_adapter, load_language_model
from tenant.tasks import Tasks
from tests.tenant.endpoint.engine.conftest import Asked, generated

PROMPT = tuple(range(5, 25))


@pytest.fixture(scope="module")
def adapter(adapters: Path) -> Path:
    return adapters / "lora"


@pytest.fixture(scope="module")
def model(checkpoint: Path) -> Any:
    return load_language_model(checkpoint, remote=RemoteConfig(masking="simulate"))


@pytest.fixture(scope="module")
def engine(model: Any, tokenizer: Any, adapter: Path) -> Iterator[SequentialEngine]:
    tasks = Tasks(model)
    tasks.register("lora", adapter)
    engine = SequentialEngine(model, tokenizer, tasks=tasks, max_waiting=4)
    yield engine
    engine.close()


@pytest.mark.parametrize("name", [None, "lora"])
def test_greedy_tokens_are_those_of_generate(
    engine: SequentialEngine, checkpoint: Path, adapter: Path, name: str | None
) -> None:
    plain = load_language_model(checkpoint, remote=RemoteConfig(masking="simulate"))
    plain = plain if name is None else load_adapter(plain, adapter)
    asked = Asked(engine, PROMPT, adapter=name, max_tokens=12)
    assert asked.tokens == generated(plain, PROMPT, 12)
    done = asked.done()
    assert (done.finish, done.prompt_tokens, done.new_tokens) == ("length", len(PROMPT), 12)


@pytest.mark.parametrize("fixed_length", [False, True])
def test_a_stop_token_ends_the_answer_and_is_no_part_of_it(engine: SequentialEngine, fixed_length: bool) -> None:
    """An answer of fixed length is computed to its largest length."""
    free = Asked(engine, PROMPT, max_tokens=8).tokens
    steps = engine.load().steps
    stop = frozenset(free[3:4])
    stopped = Asked(engine, PROMPT, max_tokens=8, stop_tokens=stop, fixed_length=fixed_length)
    assert stopped.tokens == free[: free.index(free[3])]
    assert (stopped.done().finish, stopped.done().new_tokens) == ("stop", len(stopped.tokens) + 1)
    assert not fixed_length or engine.load().steps - steps == 8


def test_log_probabilities_of_prompt_and_answer_are_the_models_own(engine: SequentialEngine, model: Any) -> None:
    sampling = Sampling(logprobs=2, prompt_logprobs=0, temperature=2.0, seed=3, logit_bias={7: 3.0})
    asked = Asked(engine, PROMPT, max_tokens=4, sampling=sampling)
    ids = torch.tensor([PROMPT + tuple(asked.tokens)])
    with torch.no_grad():
        expected = model(ids).logits[0].double().log_softmax(-1)
    started = asked.events[0]
    assert isinstance(started, Started)
    assert started.prompt_logprobs[0] is None
    found = [one.logprob for one in started.prompt_logprobs if one]
    found += [one.logprob for one in asked.logprobs if one]
    each = expected[:-1].gather(1, ids[0, 1:, None])[:, 0]
    assert found == pytest.approx(each.tolist(), abs=1e-4)


def test_embeddings_are_hidden_states(engine: SequentialEngine, model: Any) -> None:
    with torch.no_grad():
        hidden = model.base_model(torch.tensor([PROMPT])).last_hidden_state[0]
    for pooling, expected in (("last", hidden[-1]), ("mean", hidden.mean(0))):
        asked = Asked(engine, PROMPT, pooling=pooling)
        asked.done()
        found = asked.events[0]
        assert isinstance(found, Embedded)
        assert found.vector == pytest.approx(expected.tolist(), abs=1e-5)


def test_cancelled_requests_end_and_too_many_are_refused(engine: SequentialEngine) -> None:
    first = threading.Event()
    long = Asked(engine, PROMPT, max_tokens=200, client="a", at={1: first.set})
    assert first.wait(60)
    waiting = [Asked(engine, PROMPT, max_tokens=1, client=client) for client in "aabc"]
    with pytest.raises(OverloadedError):
        Asked(engine, PROMPT)
    waiting[1].handle.cancel()
    assert isinstance(waiting[1].events[-1], Done)
    long.handle.cancel()
    assert long.done().finish == "cancelled"
    assert long.done().new_tokens < 200
    for asked in waiting:
        asked.last()
    assert engine.load().waiting == 0


def test_requests_that_cannot_be_served_are_refused(engine: SequentialEngine) -> None:
    with pytest.raises(TaskError, match="none-such"):
        Asked(engine, PROMPT, adapter="none-such")
    with pytest.raises(ConfigError, match="context"):
        Asked(engine, PROMPT, max_tokens=1 << 20)
    nothing = Asked(engine, PROMPT, max_tokens=0)
    nothing.done()
    assert len(nothing.events) == 2
