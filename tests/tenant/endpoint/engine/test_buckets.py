"""What executors see of an answer in buckets is a function of bucketed numbers, and its client sees the same answer."""

import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from tenant import RemoteConfig
from tenant.endpoint.engine.continuous import ContinuousEngine, EngineLimits
from tenant.endpoint.engine.packed_model import Output, PackedModel
from tenant.endpoint.engine.requests import Done, Event, RequestLedger, Sampling
from tenant.model.loading import load_language_model
from tests.tenant.endpoint.engine.conftest import Asked, OnlyThese

AHEAD, MOST = 3, 32
PROMPT = tuple(range(5, 25))


class Watched(PackedModel):
    """Keeps the number of rows of each pass, which is what an executor sees, and those of its LM head."""

    def __init__(self, checkpoint: Path, **changes: Any) -> None:
        super().__init__(load_language_model(checkpoint, remote=RemoteConfig(masking="simulate", **changes)))
        self.seen, self.scored = list[int](), list[int]()
        head = self.model.get_output_embeddings()
        head.register_forward_pre_hook(lambda _, given: self.scored.append(len(given[0])))

    def __call__(self, rows: Any) -> list[Output]:
        self.seen.append(sum(len(part.tokens) for part in rows))
        return super().__call__(rows)


@pytest.fixture(scope="module", params=[0, AHEAD], ids=["one token per pass", "draft"])
def engine(request: pytest.FixtureRequest, checkpoint: Path, tokenizer: Any) -> Iterator[ContinuousEngine]:
    packed = Watched(checkpoint, tied_head=True)
    limits = EngineLimits(step_rows=64, prompt_rows=MOST)
    engine = ContinuousEngine(packed, tokenizer, ahead=request.param, limits=limits)
    engine._prefixes.keep = lambda *_: None  # type: ignore[method-assign] # the examples begin alike
    yield engine
    engine.close()


def trace(engine: ContinuousEngine, prompt: tuple[int, ...], **said: Any) -> list[int]:
    """Return the number of rows of each pass of an answer."""
    seen = engine._packed.seen = []  # type: ignore[attr-defined]
    Asked(engine, prompt, **said).done()
    return list(seen)


tokens = st.integers(3, 300)


@settings(max_examples=10, deadline=None)
@given(data=st.data(), bucket=st.integers(1, 36), prompts=st.integers(1, 3), passes=st.integers(1, 2))
def test_an_executor_sees_bucketed_numbers_only(
    engine: ContinuousEngine, data: st.DataObject, bucket: int, prompts: int, passes: int
) -> None:
    """Two answers whose prompts and lengths lie in the same buckets have the same trace, whatever their tokens. With
    guesses, buckets are of passes: right ones save whole buckets. Rows of prompts are in buckets of `MOST` at most."""
    unit, seen = min(bucket, MOST), list[tuple[list[int], list[int]]]()
    for _ in range(2):
        length = data.draw(st.integers((prompts - 1) * unit + 1, prompts * unit))
        prompt = tuple(data.draw(st.lists(tokens, min_size=length, max_size=length)))
        new = data.draw(st.integers((passes - 1) * bucket + 1, passes * bucket))
        rows = trace(engine, prompt, max_tokens=new, bucket=bucket)
        read = list(accumulate(rows)).index(prompts * unit) + 1
        seen.append((rows[:read], rows[read:]))
    assert seen[0][0] == seen[1][0]
    for _, decoding in seen:
        assert set(decoding) <= {1 + engine._ahead}
        assert (1 + len(decoding)) % bucket == 0
        assert 1 + len(decoding) <= passes * bucket
    assert engine._ahead or seen[0] == seen[1]


ANSWERS: dict[str, dict[str, Any]] = {
    "greedy": {"max_tokens": 13},
    "sampled": {"max_tokens": 11, "sampling": Sampling(temperature=0.9, seed=4, logprobs=2, presence_penalty=0.2)},
    "one token": {"max_tokens": 1},
    "no token": {"max_tokens": 0},
    "prompt's log probabilities": {"max_tokens": 2, "sampling": Sampling(prompt_logprobs=1)},
    "stop token": {"max_tokens": 20, "stop_tokens": frozenset(range(0, 320, 5))},
    "stop text": {"max_tokens": 20, "stop": ("e", " the")},
    "grammar": {"max_tokens": 30, "sampling": Sampling(grammar=lambda: OnlyThese(5, 7))},
    "embedding": {"pooling": "mean"},
}


def shown(events: list[Event]) -> list[Event]:
    """The events of a client, without costs."""
    return [replace(one, ledger=RequestLedger()) if isinstance(one, Done) else one for one in events]


@pytest.mark.parametrize("bucket", [2, 8, 50])
def test_a_bucket_changes_nothing_for_the_client(engine: ContinuousEngine, bucket: int) -> None:
    """The same tokens, texts, log probabilities and end, event by event, as a stream gets them; and answers that run
    together end at their own buckets."""
    plain = [Asked(engine, PROMPT, **said) for said in ANSWERS.values()]
    filled = [Asked(engine, PROMPT, bucket=bucket, **said) for said in ANSWERS.values()]
    for case, one, other in zip(ANSWERS, plain, filled, strict=True):
        assert one.done().finish == other.done().finish, case
        assert shown(other.events) == shown(one.events), case


def test_a_cancelled_answer_fills_its_bucket(engine: ContinuousEngine) -> None:
    """A client stops where the text tells it to."""
    second = threading.Event()
    seen = engine._packed.seen = []  # type: ignore[attr-defined]
    asked = Asked(engine, PROMPT, max_tokens=200, bucket=16, at={2: second.set})
    assert second.wait(60)
    asked.handle.cancel()
    assert asked.done().finish == "cancelled"
    assert len(seen) % 16 == 0


@pytest.mark.parametrize("engine", [0], indirect=True)
@pytest.mark.parametrize("ahead", [0, AHEAD])
def test_with_a_pace_every_step_has_the_same_rows_also_without_requests(
    checkpoint: Path, tokenizer: Any, engine: ContinuousEngine, ahead: int
) -> None:
    """Prompts, answers and nothing look alike, also at an offloaded LM head, and answers are those of an engine without
    a pace."""
    packed = Watched(checkpoint, tied_head=True)
    limits = EngineLimits(step_rows=8, pace_s=0.001, running=5)
    paced = ContinuousEngine(packed, tokenizer, ahead=ahead, limits=limits)
    said: dict[str, Any] = {"max_tokens": 9, "sampling": Sampling(temperature=0.8, seed=3)}
    asked = [Asked(paced, PROMPT[i:], **said) for i in range(12)]
    assert [one.tokens for one in asked] == [Asked(engine, PROMPT[i:], **said).tokens for i in range(12)]
    idle, end = paced.load().steps + 3, time.monotonic() + 60
    while paced.load().steps < idle:
        assert time.monotonic() < end, "no step without requests"
    paced.close()
    assert {*packed.seen} == {*packed.scored} == {8}


@pytest.mark.parametrize("length", [8, 11, 16])
def test_log_probabilities_of_a_prompt_do_not_show_its_length(engine: ContinuousEngine, length: int) -> None:
    scored = engine._packed.scored = []  # type: ignore[attr-defined]
    said: dict[str, Any] = {"max_tokens": 0, "sampling": Sampling(prompt_logprobs=0), "bucket": 8}
    Asked(engine, PROMPT[:length], **said).done()
    assert sum(scored) % 8 == 0
