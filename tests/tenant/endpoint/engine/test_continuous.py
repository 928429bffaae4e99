"""The engine that computes all requests together."""

import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from peft import LoraConfig

from symbiosis_priv.errors import ConfigError, DeadlineExceededError, NonFiniteError, OverloadedError, TaskError
from tenant import RemoteConfig, backend_of
from tenant.endpoint.engine.continuous import ContinuousEngine, EngineLimits
from tenant.endpoint.engine.kv import BLOCK
from tenant.endpoint.engine.packed_model import PackedModel
from tenant.endpoint.engine.requests import Done, Sampling, Started
from tenant.endpoint.engine.single_model import SingleModel
from tenant.model.loading import load_adapter, load_language_model
from tenant.tasks import Tasks
from tests.adapters import write_adapter
from tests.tenant.endpoint.engine.conftest import NAMES, Asked, generated

ADAPTERS = [None, *NAMES]
LOGPROBS = Sampling(logprobs=3)
PROMPT = tuple(range(5, 25))


def prompt(seed: int, tokens: int) -> tuple[int, ...]:
    return tuple(torch.randint(3, 320, (tokens,), generator=torch.Generator().manual_seed(seed)).tolist())


Open = Callable[..., ContinuousEngine]


@pytest.fixture
def opened(model: Any, tokenizer: Any, tasks: Tasks) -> Iterator[Open]:
    """`opened(**limits)`: an engine, closed after the test."""
    engines = []

    def open_engine(**limits: int) -> ContinuousEngine:
        engines.append(ContinuousEngine(PackedModel(model, tasks), tokenizer, limits=EngineLimits(**limits)))
        return engines[-1]

    yield open_engine
    for engine in engines:
        engine.close()


@pytest.fixture(scope="module")
def engine(model: Any, tokenizer: Any, tasks: Tasks) -> Iterator[ContinuousEngine]:
    engine = ContinuousEngine(PackedModel(model, tasks), tokenizer, limits=EngineLimits(step_rows=48))
    yield engine
    engine.close()


Expected = Callable[[str | None, list[tuple[int, ...]], int], list[list[int]]]


@pytest.fixture(scope="module")
def expected(checkpoint: Path, adapters: Path) -> Expected:
    """`expected(adapter, prompts, new)`: greedy tokens of `model.generate()` with PEFT's own model."""

    def generate(adapter: str | None, prompts: list[tuple[int, ...]], new: int) -> list[list[int]]:
        model = load_language_model(checkpoint, remote=RemoteConfig(masking="simulate"), dtype=torch.float32)
        model = model if adapter is None else load_adapter(model, adapters / adapter)
        return [generated(model, prompt, new) for prompt in prompts]

    return generate


def test_32_streams_over_8_adapters_get_the_tokens_of_generate(engine: ContinuousEngine, expected: Expected) -> None:
    prompts = {name: [prompt(4 * i + j, 9 + i) for j in range(4)] for i, name in enumerate(ADAPTERS)}
    steps = engine.load().steps
    asked = {
        name: [Asked(engine, each, adapter=name, client=str(j), max_tokens=6) for j, each in enumerate(prompts[name])]
        for name in ADAPTERS
    }
    for name in ADAPTERS:
        assert [one.tokens for one in asked[name]] == expected(name, prompts[name], 6), name
    # every step gives a token to all answers; the other steps read 400 tokens of prompt, at least 16 in a step
    assert engine.load().steps - steps <= 6 + 400 // 16


def test_a_model_that_is_computed_one_request_at_a_time_has_its_adapters(
    model: Any, tokenizer: Any, tasks: Tasks, expected: Expected
) -> None:
    engine = ContinuousEngine(SingleModel(model, tasks), tokenizer)
    asked = {name: Asked(engine, PROMPT, adapter=name, max_tokens=5) for name in (None, "lora", "oft")}
    assert {name: [one.tokens] for name, one in asked.items()} == {name: expected(name, [PROMPT], 5) for name in asked}
    engine.close()


neighbours = st.lists(
    st.tuples(st.sampled_from(ADAPTERS), st.integers(1, 40), st.integers(1, 5), st.integers(0, 9), st.booleans()),
    max_size=7,
)


@settings(max_examples=6)
@given(adapter=st.sampled_from(ADAPTERS), length=st.integers(1, 40), others=neighbours, seed=st.integers(0, 9))
def test_log_probabilities_have_the_same_bits_in_any_company(
    engine: ContinuousEngine,
    adapter: str | None,
    length: int,
    others: list[tuple[str | None, int, int, int, bool]],
    seed: int,
) -> None:
    """Neighbours join while the sequence decodes, and leave at their end or by cancellation."""
    joined: list[Asked] = []

    def join(token: int) -> None:
        for index, (name, tokens, new, start, cancels) in enumerate(others):
            if start == token:
                leave = {1: lambda: joined[-1].handle.cancel()} if cancels else {}
                joined.append(Asked(engine, prompt(100 + index, tokens), adapter=name, max_tokens=new, at=leave))

    # log probabilities of the prompt are asked for, so that no known keys and values are used
    said: dict[str, Any] = {"adapter": adapter, "max_tokens": 10, "sampling": Sampling(logprobs=3, prompt_logprobs=1)}
    alone = Asked(engine, prompt(seed, length), **said)
    alone.done()
    join(0)
    company = Asked(engine, prompt(seed, length), at={token: partial(join, token) for token in range(1, 10)}, **said)
    assert company.logprobs == alone.logprobs
    assert company.events[0] == alone.events[0]  # the log probabilities of the prompt
    for other in joined:
        other.last()


def test_a_known_beginning_is_not_computed_again_and_gives_the_same_bits(opened: Open) -> None:
    engine, text = opened(), prompt(1, 30)
    first = {name: Asked(engine, text, adapter=name, max_tokens=4, sampling=LOGPROBS) for name in (None, "lora", "oft")}
    before = {name: one.logprobs for name, one in first.items()}
    assert len({str(logprobs) for logprobs in before.values()}) == 3
    assert [one.done().ledger.cached_tokens for one in first.values()] == [0, 0, 0]
    for name in first:
        again = Asked(engine, text, adapter=name, max_tokens=4, sampling=LOGPROBS)
        assert again.logprobs == before[name]
        assert again.done().ledger.cached_tokens == 29
    # the answer is known, too: a second question in a conversation
    conversation = (*text, *first["lora"].tokens, 7, 8)
    assert Asked(engine, conversation, adapter="lora").done().ledger.cached_tokens == 33


def test_a_client_cannot_find_out_what_another_one_has_asked(engine: ContinuousEngine) -> None:
    """If clients shared a cache, the number of cached tokens would tell a client how far its guess is right."""
    text = prompt(52, 30)
    Asked(engine, text, client="a", max_tokens=4).done()
    assert Asked(engine, text, client="b", max_tokens=1).done().ledger.cached_tokens == 0
    assert Asked(engine, text, client="a", max_tokens=1).done().ledger.cached_tokens == 29


def test_an_adapter_that_was_loaded_again_shares_no_beginning(model: Any, tokenizer: Any, adapters: Path) -> None:
    tasks = Tasks(model)
    engine = ContinuousEngine(PackedModel(model, tasks), tokenizer)
    tasks.register("mine", adapters / "lora")
    first = Asked(engine, PROMPT, adapter="mine", max_tokens=4, sampling=LOGPROBS).logprobs
    tasks.unregister("mine")
    tasks.register("mine", adapters / "lora-b")
    other = Asked(engine, PROMPT, adapter="mine", max_tokens=4, sampling=LOGPROBS)
    assert other.logprobs != first
    assert other.done().ledger.cached_tokens == 0
    tasks.register("same", adapters / "lora-b")
    assert other.logprobs == Asked(engine, PROMPT, adapter="same", max_tokens=4, sampling=LOGPROBS).logprobs
    engine.close()
    tasks.close()


def test_an_adapter_cannot_be_unloaded_while_an_answer_uses_it(engine: ContinuousEngine, tasks: Tasks) -> None:
    refused: list[Exception] = []

    def unload() -> None:
        try:
            tasks.unload("ia3")
        except TaskError as error:
            refused.append(error)

    Asked(engine, PROMPT, adapter="ia3", max_tokens=3, at={2: unload}).done()
    assert len(refused) == 1
    tasks.unload("ia3")


def test_requests_wait_for_memory_and_too_large_ones_are_refused(opened: Open, model: Any) -> None:
    block = PackedModel(model).shape.bytes(1)
    engine = opened(memory=block)
    with pytest.raises(ConfigError, match=f"{2 * block:,}.*{block:,}"):
        Asked(engine, PROMPT, max_tokens=BLOCK)
    running: list[int] = []
    watch = {2: lambda: running.append(engine.load().running)}
    asked = [Asked(engine, prompt(i, 20), max_tokens=3, at=watch) for i in range(3)]
    for one in asked:
        one.done()
    assert running == [1, 1, 1]
    assert engine._prefixes.bytes <= block


def test_a_failed_product_fails_its_requests_and_the_engine_lives(
    engine: ContinuousEngine, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = Asked(engine, PROMPT, max_tokens=4).tokens
    lost = DeadlineExceededError("no answer from executor 'one' within 1 s")

    def fail(*_: Any, **__: Any) -> None:
        monkeypatch.undo()  # only this product
        raise lost

    backend = backend_of(model)
    asked = [Asked(engine, PROMPT, max_tokens=4, at={2: lambda: monkeypatch.setattr(backend, "multiply", fail)})]
    assert asked[0].error() is lost
    assert Asked(engine, PROMPT, max_tokens=4).tokens == right


def test_a_request_whose_own_numbers_overflow_fails_alone(
    model: Any, tokenizer: Any, checkpoint: Path, tmp_path: Path
) -> None:
    config = LoraConfig(r=2, lora_alpha=10**40, target_modules=["v_proj"])
    tasks = Tasks(model)
    write_adapter(load_language_model(checkpoint), tmp_path / "huge", config)
    tasks.register("huge", tmp_path / "huge")
    engine = ContinuousEngine(PackedModel(model, tasks), tokenizer)
    right = Asked(engine, PROMPT, max_tokens=5).tokens
    asked: list[Asked] = []
    other = Asked(
        engine, PROMPT, max_tokens=5, at={2: lambda: asked.append(Asked(engine, PROMPT, adapter="huge", max_tokens=5))}
    )
    assert other.tokens == right
    assert isinstance(asked[0].error(), NonFiniteError)
    engine.close()
    tasks.close()


def test_a_long_prompt_does_not_stop_the_tokens_of_others(opened: Open) -> None:
    engine, began = opened(step_rows=16, prompt_rows=8), threading.Event()
    during: list[int] = []
    long: list[Asked] = []

    def count() -> None:
        if began.is_set() and not long[0].events:
            during.append(1)

    short = Asked(engine, PROMPT, max_tokens=40, at=dict.fromkeys(range(1, 41), count))
    long.append(Asked(engine, prompt(3, 200), max_tokens=1))
    began.set()
    short.done()
    long[0].done()
    assert len(during) >= 10


def test_clients_get_equal_shares_of_a_step(opened: Open) -> None:
    """A client with many prompts does not delay another one's only prompt."""
    engine = opened(step_rows=8, prompt_rows=8)
    order: list[str] = []
    started = {client: {1: partial(order.append, client)} for client in "ab"}
    asked = [Asked(engine, prompt(i, 40), client="a", max_tokens=1, at=started["a"]) for i in range(6)]
    asked.append(Asked(engine, prompt(9, 40), client="b", max_tokens=1, at=started["b"]))
    for one in asked:
        one.done()
    assert order.index("b") <= 3


@pytest.mark.parametrize("limit", ["places", "memory"])
def test_a_client_leaves_room_for_others_to_run(opened: Open, model: Any, limit: str) -> None:
    """The requests of one key may run for hours; another key's request runs beside them."""
    block = PackedModel(model).shape.bytes(1)
    engine = opened(clients=2, running=4) if limit == "places" else opened(clients=2, memory=4 * block)
    first, paused, second, ended = *(threading.Event() for _ in range(3)), list[bool]()

    def look() -> None:
        ended.extend(isinstance(event, Done) for one in taken for event in one.events)

    def pause() -> None:
        paused.set()
        second.wait()

    pauses: dict[int, Callable[[], object]] = {
        1: first.wait,
        5: pause,
    }  # the others run beside the first one, and wait for the other client
    taken = [Asked(engine, PROMPT, client="a", max_tokens=200, at=pauses) for _ in range(4)]
    first.set()
    assert paused.wait(60)
    other = Asked(engine, PROMPT, client="b", max_tokens=1, at={1: look})
    second.set()
    assert other.done().new_tokens == 1
    assert ended
    assert not any(ended)
    for one in taken:
        one.handle.cancel()
        one.done()


@pytest.mark.parametrize("bucket", [1, 3, 8])
def test_a_stop_token_ends_the_answer_and_is_no_part_of_it(engine: ContinuousEngine, bucket: int) -> None:
    """Passes without tokens fill the bucket, also beyond the largest number of tokens."""
    free = Asked(engine, PROMPT, max_tokens=8).tokens
    steps, stop = engine.load().steps, frozenset(free[3:4])
    stopped = Asked(engine, PROMPT, max_tokens=6, stop_tokens=stop, bucket=bucket)
    assert stopped.tokens == free[: free.index(free[3])]
    new = len(stopped.tokens) + 1
    assert (stopped.done().finish, stopped.done().new_tokens) == ("stop", new)
    assert engine.load().steps - steps == new + -new % bucket


def test_log_probabilities_of_prompt_and_answer_are_the_models_own(engine: ContinuousEngine, model: Any) -> None:
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


def test_embeddings_are_hidden_states(engine: ContinuousEngine, model: Any) -> None:
    with torch.no_grad():
        hidden = model.base_model(torch.tensor([PROMPT])).last_hidden_state[0]
    for pooling, expected in (("last", hidden[-1]), ("mean", hidden.mean(0))):
        found = Asked(engine, PROMPT, pooling=pooling).done()
        assert found.new_tokens == 0
        torch.testing.assert_close(torch.tensor(found.vector), expected, rtol=1e-3, atol=1e-3)


def test_requests_that_cannot_be_served_are_refused(engine: ContinuousEngine) -> None:
    for wrong, new in (((), 1), ((10**6,), 1), ((-1,), 1), (PROMPT, 1 << 20)):
        with pytest.raises(ConfigError):
            Asked(engine, wrong, max_tokens=new)
    with pytest.raises(TaskError, match="none-such"):
        Asked(engine, PROMPT, adapter="none-such")


def test_cancelled_requests_end_within_a_step_and_too_many_are_refused(opened: Open) -> None:
    engine, first = opened(running=1, waiting=4), threading.Event()
    asked: list[Asked] = []
    asked.append(Asked(engine, PROMPT, max_tokens=100, at={3: lambda: asked[0].handle.cancel()}))
    assert asked[0].done().finish == "cancelled"
    assert len(asked[0].got) == 3
    assert engine.load().running == 0
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
    for one in waiting:
        one.last()
    assert engine.load().waiting == 0


def test_closing_cancels_what_runs_and_waits(opened: Open) -> None:
    engine = opened(running=1)
    asked = [Asked(engine, PROMPT, max_tokens=480) for _ in range(2)]
    engine.close()
    assert [one.done().finish for one in asked] == ["cancelled"] * 2
    with pytest.raises(OverloadedError):
        Asked(engine, PROMPT)
