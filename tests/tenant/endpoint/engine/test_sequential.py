"""The engine that answers one request at a time."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from symbiosis_priv.errors import ConfigError, OverloadedError, TaskError
from tenant import RemoteConfig
from tenant.endpoint.engine.requests import Done, Embedded, EngineRequest, Event, Sampling, Started, Token
from tenant.endpoint.engine.sequential import SequentialEngine
from tenant.model.loading import load_adapter, load_language_model
from tenant.tasks import Tasks

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


class Events:
    """A sink that keeps the events."""

    def __init__(self) -> None:
        self.all: list[Event] = []
        self.ended, self.first = threading.Event(), threading.Event()

    def __call__(self, event: Event) -> None:
        self.all.append(event)
        if isinstance(event, Token):
            self.first.set()
        if not isinstance(event, (Started, Token, Embedded)):
            self.ended.set()

    def wait(self) -> list[Event]:
        assert self.ended.wait(60)
        return self.all

    @property
    def tokens(self) -> list[int]:
        return [event.id for event in self.wait() if isinstance(event, Token)]


def answered(engine: SequentialEngine, **said: Any) -> Events:
    events = Events()
    engine.submit(EngineRequest(id="1", **({"prompt": PROMPT} | said)), events)
    events.wait()
    return events


@pytest.mark.parametrize("name", [None, "lora"])
def test_greedy_tokens_are_those_of_generate(
    engine: SequentialEngine, checkpoint: Path, adapter: Path, name: str | None
) -> None:
    plain = load_language_model(checkpoint, remote=RemoteConfig(masking="simulate"))
    plain = plain if name is None else load_adapter(plain, adapter)
    ids = torch.tensor([PROMPT])
    expected = plain.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False, eos_token_id=None
    )[0, len(PROMPT) :].tolist()
    events = answered(engine, adapter=name, max_tokens=12)
    assert events.tokens == expected
    done = events.all[-1]
    assert isinstance(done, Done)
    assert (done.finish, done.prompt_tokens, done.new_tokens) == ("length", len(PROMPT), 12)


def test_a_stop_token_ends_the_answer_and_is_no_part_of_it(engine: SequentialEngine) -> None:
    free = answered(engine, max_tokens=8).tokens
    stopped = answered(engine, max_tokens=8, stop_tokens=frozenset(free[3:4]))
    assert stopped.tokens == free[: free.index(free[3])]
    done = stopped.all[-1]
    assert isinstance(done, Done)
    assert done.finish == "stop"
    assert done.new_tokens == len(stopped.tokens) + 1


def test_an_answer_of_fixed_length_is_computed_to_its_largest_length(engine: SequentialEngine) -> None:
    free = answered(engine, max_tokens=8).tokens
    steps = engine.load().steps
    stopped = answered(engine, max_tokens=8, stop_tokens=frozenset(free[3:4]), fixed_length=True)
    assert stopped.tokens == free[: free.index(free[3])]
    assert isinstance(done := stopped.all[-1], Done)
    assert (done.finish, done.new_tokens) == ("stop", len(stopped.tokens) + 1)
    assert engine.load().steps - steps == 8


def test_log_probabilities_of_prompt_and_answer_are_the_models_own(engine: SequentialEngine, model: Any) -> None:
    sampling = Sampling(logprobs=2, prompt_logprobs=0, temperature=2.0, seed=3, logit_bias={7: 3.0})
    events = answered(engine, max_tokens=4, sampling=sampling)
    ids = torch.tensor([PROMPT + tuple(events.tokens)])
    with torch.no_grad():
        expected = model(ids).logits[0].double().log_softmax(-1)
    started = events.all[0]
    assert isinstance(started, Started)
    assert started.prompt_logprobs[0] is None
    found = [one.logprob for one in started.prompt_logprobs if one]
    found += [event.logprob.logprob for event in events.all if isinstance(event, Token) and event.logprob]
    each = expected[:-1].gather(1, ids[0, 1:, None])[:, 0]
    assert found == pytest.approx(each.tolist(), abs=1e-4)


def test_embeddings_are_hidden_states(engine: SequentialEngine, model: Any) -> None:
    with torch.no_grad():
        hidden = model.base_model(torch.tensor([PROMPT])).last_hidden_state[0]
    for pooling, expected in (("last", hidden[-1]), ("mean", hidden.mean(0))):
        found = answered(engine, pooling=pooling).all[0]
        assert isinstance(found, Embedded)
        assert found.vector == pytest.approx(expected.tolist(), abs=1e-5)


def test_cancelled_requests_end_and_too_many_are_refused(engine: SequentialEngine) -> None:
    long = Events()
    running = engine.submit(EngineRequest(id="long", prompt=PROMPT, max_tokens=200, client="a"), long)
    assert long.first.wait(60)
    waiting = [Events() for _ in range(4)]
    handles = [
        engine.submit(EngineRequest(id="w", prompt=PROMPT, max_tokens=1, client=client), events)
        for client, events in zip("aabc", waiting, strict=True)
    ]
    with pytest.raises(OverloadedError):
        engine.submit(EngineRequest(id="more", prompt=PROMPT), long)
    handles[1].cancel()
    assert waiting[1].ended.is_set()
    running.cancel()
    last = long.wait()[-1]
    assert isinstance(last, Done)
    assert last.finish == "cancelled"
    assert last.new_tokens < 200
    for events in waiting:
        events.wait()
    assert engine.load().waiting == 0


def test_requests_that_cannot_be_served_are_refused(engine: SequentialEngine) -> None:
    with pytest.raises(TaskError, match="none-such"):
        engine.submit(EngineRequest(id="1", prompt=PROMPT, adapter="none-such"), Events())
    with pytest.raises(ConfigError, match="context"):
        engine.submit(EngineRequest(id="1", prompt=PROMPT, max_tokens=1 << 20), Events())
    assert len(answered(engine, max_tokens=0).all) == 2
