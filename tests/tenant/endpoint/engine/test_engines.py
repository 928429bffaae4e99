"""What both engines promise, whether they compute all requests together or one after another."""

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from symbiosis_priv.errors import ConfigError, OverloadedError, TaskError
from tenant.endpoint.engine.continuous import ContinuousEngine, EngineLimits
from tenant.endpoint.engine.packed_model import PackedModel
from tenant.endpoint.engine.queued import Engine
from tenant.endpoint.engine.requests import Done, Embedded, Sampling, Started
from tenant.endpoint.engine.sequential import SequentialEngine
from tenant.tasks import Tasks
from tests.tenant.endpoint.engine.conftest import Asked

PROMPT = tuple(range(5, 25))


@pytest.fixture(scope="module", params=["together", "one after another"])
def engine(request: pytest.FixtureRequest, model: Any, tokenizer: Any, tasks: Tasks) -> Iterator[Engine]:
    made: Engine
    if request.param == "together":
        limits = EngineLimits(running=1, waiting=4)
        made = ContinuousEngine(PackedModel(model, tasks), tokenizer, tasks=tasks, limits=limits)
    else:
        made = SequentialEngine(model, tokenizer, tasks=tasks, max_waiting=4)
    yield made
    made.close()


@pytest.mark.parametrize("bucket", [1, 3, 8])
def test_a_stop_token_ends_the_answer_and_is_no_part_of_it(engine: Engine, bucket: int) -> None:
    """Passes without tokens fill the bucket, also beyond the largest number of tokens. `generate()` could not fill the
    prompt's, and refuses a bucket."""
    if bucket > 1 and isinstance(engine, SequentialEngine):
        with pytest.raises(ConfigError, match="leave out --answer-bucket"):
            Asked(engine, PROMPT, bucket=bucket)
        return
    free = Asked(engine, PROMPT, max_tokens=8).tokens
    steps, stop = engine.load().steps, frozenset(free[3:4])
    stopped = Asked(engine, PROMPT, max_tokens=6, stop_tokens=stop, bucket=bucket)
    assert stopped.tokens == free[: free.index(free[3])]
    new = len(stopped.tokens) + 1
    assert (stopped.done().finish, stopped.done().new_tokens) == ("stop", new)
    assert engine.load().steps - steps == new + -new % bucket


def test_log_probabilities_of_prompt_and_answer_are_the_models_own(engine: Engine, model: Any) -> None:
    sampling = Sampling(logprobs=2, prompt_logprobs=0, temperature=2.0, seed=3, logit_bias={7: 3.0})
    asked = Asked(engine, PROMPT, max_tokens=4, sampling=sampling)
    ids = torch.tensor([PROMPT + tuple(asked.tokens)])
    with torch.no_grad():
        expected = model(ids).logits[0].double().log_softmax(-1)
    started = asked.events[0]
    assert isinstance(started, Started)
    assert started.prompt_logprobs[0] is None
    found = [one.logprob for one in (*started.prompt_logprobs, *asked.logprobs) if one]
    each = expected[:-1].gather(1, ids[0, 1:, None])[:, 0]
    assert found == pytest.approx(each.tolist(), abs=1e-4)


def test_embeddings_are_hidden_states(engine: Engine, model: Any) -> None:
    with torch.no_grad():
        hidden = model.base_model(torch.tensor([PROMPT])).last_hidden_state[0]
    for pooling, expected in (("last", hidden[-1]), ("mean", hidden.mean(0))):
        asked = Asked(engine, PROMPT, pooling=pooling)
        assert asked.done().new_tokens == 0
        found = asked.events[0]
        assert isinstance(found, Embedded)
        torch.testing.assert_close(torch.tensor(found.vector), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("said", "error", "named"),
    [({"adapter": "none-such"}, TaskError, "none-such"), ({"max_tokens": 1 << 20}, ConfigError, "context")],
)
def test_requests_that_cannot_be_served_are_refused(
    engine: Engine, said: dict[str, Any], error: type[Exception], named: str
) -> None:
    with pytest.raises(error, match=named):
        Asked(engine, PROMPT, **said)


@pytest.mark.parametrize("engine", ["together"], indirect=True)
@pytest.mark.parametrize("prompt", [(), (10**6,), (-1,)])
def test_a_prompt_has_tokens_of_the_model(engine: Engine, prompt: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError):
        Asked(engine, prompt)


def test_cancellation_ends_a_request_within_a_step(engine: Engine) -> None:
    asked: list[Asked] = []
    asked.append(Asked(engine, PROMPT, max_tokens=100, at={3: lambda: asked[0].handle.cancel()}))
    assert asked[0].done().finish == "cancelled"
    assert len(asked[0].got) == 3
    assert engine.load().running == 0


def test_cancelled_requests_end_and_too_many_are_refused(engine: Engine) -> None:
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
