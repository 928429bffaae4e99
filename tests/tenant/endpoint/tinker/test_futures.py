"""Futures of the official client: fetched, timed out, cancelled, sent again, failed; and a client that was killed."""

import asyncio
import json
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests import warm
from tests.tenant.endpoint.tinker.conftest import KEYS, QUIET, TEXTS, Gate, adam, data_of, equal, outputs, post, steps
from tests.waiting import until

pytest.importorskip("tinker")
import tinker
from tinker.proto.response_conv import deserialize_forward_backward_output
from tinker.types import LoraConfig as LoraOptions

from tenant.endpoint.api.errors import ApiError
from tenant.endpoint.api.running import Running
from tenant.endpoint.tinker import futures, routes, training as endpoint
from tenant.endpoint.tinker.futures import Futures
from tenant.endpoint.tinker.routes import Tinker
from tenant.endpoint.tinker.training import Job, Run, Training
from tenant.endpoint.tinker.wire import Example, outputs_message

pytestmark = QUIET


def fetch(address: str, id: str, key: str = KEYS[0]) -> tuple[int, bytes]:
    return post(address, "retrieve_future", {"request_id": id}, key)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    """Before the result of a training client's request. The client is told at once to ask again for a result."""
    found = Gate(outputs_message)
    monkeypatch.setattr(futures, "_POLL_S", 0.2)
    monkeypatch.setattr(endpoint, "outputs_message", found.pass_)
    return found


def test_a_future_that_times_out_is_computed_once_and_fetched_later(train: Any, address: str, gate: Gate) -> None:
    """As often as its key likes, and by no other key."""
    training = train()
    forward = training.forward_backward(data_of(), "cross_entropy")
    step = training.optim_step(adam())
    gate.wait()
    for future in (forward, step):
        with pytest.raises(TimeoutError):
            future.result(timeout=0.05)
    gate.opened.set()
    assert step.result().metrics["grad_norm"] > 0
    found = [outputs(forward.result()), *steps(training, 2)]
    assert equal(steps(train()), found)
    assert fetch(address, f"{training.model_id}:1") == fetch(address, f"{training.model_id}:1")
    assert fetch(address, f"{training.model_id}:1")[0] == 200
    assert fetch(address, f"{training.model_id}:1", KEYS[1])[0] == fetch(address, "x")[0] == 410
    assert post(address, "get_info", {"model_id": training.model_id}, KEYS[1])[0] == 404
    assert post(address, "get_info", {"model_id": training.model_id}, "tml-other")[0] == 401


@pytest.mark.parametrize("late", [False, True])
def test_a_sample_that_is_cancelled_or_times_out_ends(
    connect: Any, address: str, monkeypatch: pytest.MonkeyPatch, late: bool
) -> None:
    sampler, gate = connect().create_sampling_client(base_model="tiny").result(), Gate(Running._receive)
    id = f"{sampler._sampling_session_id}:0"
    monkeypatch.setattr(futures, "_POLL_S", 0.2)
    monkeypatch.setattr(Running, "_receive", lambda *args: gate.pass_(*args))
    sample = sampler.sample(tinker.ModelInput.from_ints([1, 2]), 2, tinker.SamplingParams(stop=[]))
    gate.wait()
    assert fetch(address, id)[0] == 408
    if late:
        with pytest.raises(TimeoutError):
            asyncio.run(sample.result_async(timeout=0.05))
    else:
        sample.future().cancel()
    until(lambda: b"499: the request was cancelled" in fetch(address, id)[1])
    gate.opened.set()
    assert sampler.sample(tinker.ModelInput.from_ints([1]), 1, tinker.SamplingParams(max_tokens=1)).result().sequences


def test_a_sample_whose_id_begins_like_that_of_a_cancelled_one_goes_on(
    connect: Any, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampler, gate = connect().create_sampling_client(base_model="tiny").result(), Gate(Running._receive)
    monkeypatch.setattr(Running, "_receive", lambda *args: gate.pass_(*args))
    body = {"sampling_session_id": sampler._sampling_session_id, "sampling_params": {"max_tokens": 1}}
    body["prompt"] = {"chunks": [{"type": "encoded_text", "tokens": [1]}]}
    cancelled, other = (json.loads(post(address, "asample", {**body, "seq_id": n})[1])["request_id"] for n in (1, 10))
    gate.wait()
    assert post(address, "cancel_future", {"request_id": cancelled})[0] == 204
    gate.opened.set()
    assert b"499: the request was cancelled" in fetch(address, cancelled)[1]
    assert b"499" not in fetch(address, other)[1]


def test_a_request_of_a_training_client_is_not_cancelled(train: Any, address: str, gate: Gate) -> None:
    """It is computed in any case, so its result stays."""
    training = train()
    forward = training.forward_backward(data_of(), "cross_entropy")
    gate.wait()
    assert post(address, "cancel_future", {"request_id": f"{training.model_id}:1"})[0] == 204
    gate.opened.set()
    assert outputs(forward.result())


def test_a_snapshot_has_a_number_if_the_client_sends_none(train: Any, address: str) -> None:
    body, ids = {"model_id": train().model_id}, list[str]()
    for _ in range(2):
        ids.append(json.loads(post(address, "save_weights_for_sampler", body)[1])["request_id"])
        until(lambda: b"sampling_session_id" in fetch(address, ids[-1])[1])
    assert ids[0] != ids[1]


def test_a_request_that_is_sent_again_trains_once(train: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The answers to the first `forward_backward` and `optim_step` are lost, so the client sends both again."""
    expected, training = steps(train()), train()
    submit, lost = Tinker._submit, set[str]()

    def lose(*args: Any, **options: Any) -> Any:
        answer = submit(*args, **options)
        if len(lost) < 2 and answer["request_id"] not in lost:
            lost.add(answer["request_id"])
            raise ApiError(503, "the answer is lost")
        return answer

    monkeypatch.setattr(Tinker, "_submit", lose)
    assert equal(expected, steps(training))
    assert len(lost) == 2


_KILLED = """
import tinker
from tests.tenant.endpoint.tinker.conftest import data_of, steps
training = tinker.ServiceClient().create_lora_training_client("tiny", rank=2, seed=1).result()
steps(training, 1)
training.save_state("before").result()
training.forward_backward(data_of(), "cross_entropy").result()
"""


def test_a_client_that_was_killed_in_a_request_goes_on_from_its_checkpoint(
    connect: Any, train: Any, address: str, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its old request is computed once, delays nobody, and can be fetched with the same key."""
    gate.opened.set()
    steps(whole := train(1), 1)
    expected = steps(whole)
    gate.opened.clear()
    gate.reached.clear()
    gate.after = len(gate.passed) + 1
    with monkeypatch.context() as patched:
        patched.setenv("TINKER_BASE_URL", address)
        patched.setenv("TINKER_API_KEY", KEYS[0])
        with warm.Popen([sys.executable, "-W", "ignore", "-c", _KILLED]) as client:
            try:
                gate.wait()
            finally:
                client.kill()
    [kept] = tinker.RestClient(base_url=address, api_key=KEYS[0]).list_user_checkpoints().result().checkpoints
    restarted = connect().create_training_client_from_state_with_optimizer(kept.tinker_path)
    gate.opened.set()
    assert equal(expected, steps(restarted.result()))
    old = kept.tinker_path.split("/")[2]
    output = deserialize_forward_backward_output(fetch(address, f"{old}:4")[1])
    assert equal(expected[:1], [outputs(output)])


def test_a_session_without_heartbeats_ends_with_what_it_has(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the next request to another session. No client runs, whose heartbeats would end sessions at any time."""

    def sent(route: str, **body: Any) -> Any:
        return json.loads(post(address, route, body)[1])

    silent, other = (sent("create_session", tags=[], user_metadata=None, sdk_version="0") for _ in range(2))
    lora: dict[str, Any] = {"base_model": "tiny", "lora_config": {"rank": 1}}
    model = sent("create_model", **silent, model_seq_id=0, **lora)["model_id"]
    sampler = sent("create_sampling_session", **silent, sampling_session_seq_id=0)
    gate = Gate(Running._receive)
    monkeypatch.setattr(Running, "_receive", lambda *args: gate.pass_(*args))
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [1]}]}
    id = sent("asample", **sampler, seq_id=0, prompt=prompt, sampling_params={"stop": []})["request_id"]
    gate.wait()
    assert post(address, "get_info", {"model_id": model})[0] == 200
    monkeypatch.setattr(routes, "_SESSION_S", 0.0)
    sent("session_heartbeat", **other)
    assert post(address, "get_info", {"model_id": model})[0] == 404
    assert b"499: the request was cancelled" in fetch(address, id)[1]
    gate.opened.set()


def test_a_key_waits_for_its_share_of_the_rounds_only(
    train: Any, address: str, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one example in each round, one of the second key is computed before nine of the first."""
    first, second = (train(key, rank=1, train_mlp=False) for key in range(2))
    monkeypatch.setattr(endpoint, "LOGITS", 1)
    data = data_of()
    waiting = [first.forward(data[:1], "cross_entropy")]
    gate.wait()
    waiting += [first.forward(data * 3, "cross_entropy"), second.forward(data[:1], "cross_entropy")]
    until(lambda: fetch(address, f"{first.model_id}:2")[0] == 408)
    until(lambda: fetch(address, f"{second.model_id}:1", KEYS[1])[0] == 408)
    gate.opened.set()
    assert all(future.result() for future in waiting)
    assert [len(results) for (results,) in gate.passed] == [1, 1, 9]


def test_a_key_is_not_first_in_turn_with_each_new_training_client(monkeypatch: pytest.MonkeyPatch) -> None:
    """With one example in each round. Nothing runs: the test chooses the examples of each round."""
    monkeypatch.setattr(endpoint, "LOGITS", 1)
    model: Any = SimpleNamespace(get_input_embeddings=lambda: torch.nn.Embedding(9, 1), memory_limit=0)
    training = Training(model, model, model, model, name="tiny", clients=2)
    monkeypatch.setattr(training, "_thread", SimpleNamespace(submit=lambda *_: None))
    example, lora = Example(torch.zeros(1), torch.zeros(1), torch.sum), LoraOptions(rank=1)
    training.submit(0, Job(Run("long", "first", lora), examples=[example] * 9))
    order = []
    for number in range(6):
        new = Run(f"new{number}", "second", lora)
        training.submit(0, Job(new, examples=[example]))
        [(job, _)] = training._chosen()
        order.append(job.run.client)
        training.end(new)
    assert order == ["first", "second"] * 3


def test_a_round_that_raises_is_logged_without_data_and_nobody_waits_for_it(
    train: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    training = train()
    with monkeypatch.context() as patched:
        patched.setattr(Training, "_chosen", lambda _: dict[str, Any]()["secret"])
        with pytest.raises(tinker.RequestFailedError, match=r"500: .*KeyError"):
            training.forward(data_of(), "cross_entropy").result(timeout=60)
    assert "KeyError" in caplog.text
    assert "KeyError: 'secret'" not in caplog.text
    assert training.forward(data_of(), "cross_entropy").result(timeout=60).loss_fn_outputs


@pytest.mark.parametrize("logits", [1, endpoint.LOGITS])  # rounds of one example, and of all
def test_a_request_that_fails_changes_nothing(train: Any, monkeypatch: pytest.MonkeyPatch, logits: int) -> None:
    def broken(*_: Any) -> bytes:
        raise OSError

    monkeypatch.setattr(endpoint, "LOGITS", logits)
    data, found = data_of(), []
    lost = data_of(TEXTS[:1], weights=torch.full((len(TEXTS[0]) - 1,), 3e38))
    far = {"logprobs": torch.full((4,), -200.0), "advantages": torch.ones(4)}  # ppo's loss is clipped, its gradient nan
    for failing in (False, True):
        training = train()
        training.forward_backward(data, "cross_entropy").result()
        if failing:
            with pytest.raises(tinker.RequestFailedError, match="400: the loss is inf or nan"):
                training.forward_backward([*data, *lost], "cross_entropy").result()
            with pytest.raises(tinker.RequestFailedError, match="400: the loss is inf or nan, or its gradient"):
                training.forward_backward(data_of(TEXTS[:1], **far), "ppo").result()
            with pytest.raises(tinker.RequestFailedError, match="eps = 0"):  # 0 / 0 where a gradient is 0
                training.optim_step(tinker.AdamParams(eps=0.0)).result()
            with monkeypatch.context() as patched:
                patched.setattr(endpoint, "outputs_message", broken)
                with pytest.raises(tinker.RequestFailedError, match=r"500: .*OSError"):
                    training.forward_backward(data, "cross_entropy").result()
        found.append(steps(training, 2))
    assert equal(*found)


def test_the_futures_of_a_key_take_bounded_memory() -> None:
    async def run() -> None:
        futures = Futures()
        results = [asyncio.get_running_loop().create_future() for _ in range(3)]
        for (key, id), result in zip((("a", "0"), ("a", "1"), ("b", "2")), results, strict=True):
            futures.make_room(key, 100 << 20)
            futures.start(key, id, result, 100 << 20)
        with pytest.raises(ApiError, match="no result yet"):
            futures.make_room("a", 100 << 20)
        with pytest.raises(ApiError, match="would take"):
            futures.make_room("a", 1 << 30)
        results[0].set_result(bytes(90 << 20))
        first = futures.find("a", "0")
        assert first is not None
        assert len((await first.answer()).body) == 90 << 20
        futures.make_room("a", 100 << 20)
        assert [futures.find("a", id) is None for id in "01"] == [True, False]

    asyncio.run(run())
