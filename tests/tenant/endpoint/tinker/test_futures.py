"""Futures of the official client: retrieved, timed out, cancelled, sent again, and after a client was killed."""

import asyncio
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests import warm
from tests.tenant.endpoint.tinker.conftest import KEYS
from tests.tenant.endpoint.tinker.test_client import QUIET, TEXTS, Connect, datum, equal, post, steps
from tests.waiting import until

pytest.importorskip("tinker")

from tenant.endpoint.api.errors import ApiError
from tenant.endpoint.engine.gathered import Gathered
from tenant.endpoint.tinker import futures, routes, training as endpoint
from tenant.endpoint.tinker.routes import Tinker
from tenant.endpoint.tinker.wire import outputs_message

pytestmark = QUIET


class Gate:
    """Stops the thread that calls `pass_` until the test opens the gate."""

    def __init__(self, then: Callable[..., Any], *, after: int = 0) -> None:
        self.reached, self.opened, self._then, self._after = threading.Event(), threading.Event(), then, after

    def pass_(self, *args: Any) -> Any:
        self._after -= 1
        if self._after < 0:
            self.reached.set()
            assert self.opened.wait(60)
        return self._then(*args)


def until_asked(address: str, id: str, key: str) -> None:
    """Wait until a request has arrived; its result is not there."""
    until(lambda: post(address, "retrieve_future", {"request_id": id}, key)[0] == 408)


def test_a_future_that_times_out_is_computed_once_and_fetched_later(
    tinker: Any, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = steps(tinker, connect().create_lora_training_client("tiny", rank=2, seed=1).result())
    training = connect().create_lora_training_client("tiny", rank=2, seed=1).result()
    gate = Gate(outputs_message)
    with monkeypatch.context() as patched:
        patched.setattr(futures, "_POLL_S", 0.01)  # the client is told to ask again, and does
        patched.setattr(endpoint, "outputs_message", gate.pass_)
        forward = training.forward_backward([datum(tinker, text) for text in TEXTS], "cross_entropy")
        step = training.optim_step(tinker.AdamParams(learning_rate=1e-2, weight_decay=0.01, grad_clip_norm=1.0))
        assert gate.reached.wait(60)
        for future in (forward, step):
            with pytest.raises(TimeoutError):
                future.result(timeout=0.05)
        gate.opened.set()
        assert step.result().metrics["grad_norm"] > 0
    found = [[one["logprobs"].to_torch() for one in forward.result().loss_fn_outputs]]
    assert equal(expected, found + steps(tinker, training, 2))


@pytest.mark.parametrize("late", [False, True])
def test_a_sample_that_is_cancelled_or_times_out_ends(
    tinker: Any, connect: Connect, address: str, monkeypatch: pytest.MonkeyPatch, late: bool
) -> None:
    sampler = connect().create_sampling_client(base_model="tiny").result()
    request = {"request_id": f"{sampler._sampling_session_id}:0"}
    gate = Gate(Gathered.__call__)
    with monkeypatch.context() as patched:
        patched.setattr(futures, "_POLL_S", 0.01)
        patched.setattr(Gathered, "__call__", lambda *args: gate.pass_(*args))
        sample = sampler.sample(tinker.ModelInput.from_ints([1, 2]), 2, tinker.SamplingParams(stop=[]))
        assert gate.reached.wait(60)
        assert post(address, "retrieve_future", request)[0] == 408
        if late:
            with pytest.raises(TimeoutError):
                asyncio.run(sample.result_async(timeout=0.05))
        else:
            sample.future().cancel()
        until(lambda: b"499: the request was cancelled" in post(address, "retrieve_future", request)[1])
        gate.opened.set()
    assert sampler.sample(tinker.ModelInput.from_ints([1]), 1, tinker.SamplingParams(max_tokens=1)).result().sequences


def test_a_request_that_is_sent_again_trains_once(
    tinker: Any, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answers to the first `forward_backward` and `optim_step` are lost, so the client sends both again."""
    expected = steps(tinker, connect().create_lora_training_client("tiny", rank=2, seed=1).result())
    training = connect().create_lora_training_client("tiny", rank=2, seed=1).result()
    submit, lost = Tinker._submit, set[str]()

    def lose(*args: Any, **options: Any) -> Any:
        answer = submit(*args, **options)
        if len(lost) < 2 and answer["request_id"] not in lost:
            lost.add(answer["request_id"])
            raise ApiError(503, "the answer is lost")
        return answer

    monkeypatch.setattr(Tinker, "_submit", lose)
    assert equal(expected, steps(tinker, training))
    assert len(lost) == 2


_KILLED = """
import sys, tinker
from tests.tenant.endpoint.tinker.test_client import TEXTS, datum, steps
training = tinker.ServiceClient().create_lora_training_client("tiny", rank=2, seed=1).result()
steps(tinker, training, 1)
training.save_state("before").result()
training.forward_backward([datum(tinker, text) for text in TEXTS], "cross_entropy").result()
"""


def test_a_client_that_was_killed_in_a_request_goes_on_from_its_checkpoint(
    tinker: Any, connect: Connect, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its old request is computed once, delays nobody, and can be fetched with the same key. Its training client ends
    when its heartbeats have stopped for long enough."""
    whole = connect(1).create_lora_training_client("tiny", rank=2, seed=1).result()
    steps(tinker, whole, 1)
    expected = steps(tinker, whole)
    gate = Gate(outputs_message, after=1)
    with monkeypatch.context() as patched:
        patched.setenv("TINKER_BASE_URL", address)
        patched.setenv("TINKER_API_KEY", KEYS[0])
        patched.setattr(endpoint, "outputs_message", gate.pass_)
        with warm.Popen([sys.executable, "-W", "ignore", "-c", _KILLED]) as client:
            try:
                assert gate.reached.wait(60)
            finally:
                client.kill()
        [kept] = tinker.RestClient(base_url=address, api_key=KEYS[0]).list_user_checkpoints().result().checkpoints
        restarted = connect().create_training_client_from_state_with_optimizer(kept.tinker_path)
        gate.opened.set()
        assert equal(expected, steps(tinker, restarted.result()))
    old = kept.tinker_path.split("/")[2]
    status, body = post(address, "retrieve_future", {"request_id": f"{old}:4"})
    assert status == 200
    output = tinker.proto.response_conv.deserialize_forward_backward_output(body)
    assert equal(expected[:1], [[one["logprobs"].to_torch() for one in output.loss_fn_outputs]])
    ended, other = connect().create_sampling_client(base_model="tiny").result(), connect(1)
    gate = Gate(Gathered.__call__)
    with monkeypatch.context() as patched:
        patched.setattr(Gathered, "__call__", lambda *args: gate.pass_(*args))
        sample = ended.sample(tinker.ModelInput.from_ints([1]), 1, tinker.SamplingParams(stop=[]))
        assert gate.reached.wait(60)
        patched.setattr(routes, "_SESSION_S", 0.0)
        assert other.create_lora_training_client("tiny", rank=2, seed=1).result()
        assert post(address, "get_info", {"model_id": old})[0] == 404
        with pytest.raises(tinker.RequestFailedError, match="cancelled"):
            sample.result()
        gate.opened.set()


def test_a_key_waits_for_its_share_of_the_rounds_only(
    tinker: Any, connect: Connect, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one example in each round, one of the second key is computed before nine of the first."""
    clients = [connect(key).create_lora_training_client("tiny", rank=1, train_mlp=False).result() for key in range(2)]
    ended, gate = list[int](), Gate(outputs_message)

    def message(results: Any) -> Any:
        ended.append(len(results))
        return gate.pass_(results)

    monkeypatch.setattr(futures, "_POLL_S", 0.01)
    monkeypatch.setattr(endpoint, "LOGITS", 1)
    monkeypatch.setattr(endpoint, "outputs_message", message)
    data = [datum(tinker, text) for text in TEXTS]
    waiting = [clients[0].forward(data[:1], "cross_entropy")]
    assert gate.reached.wait(60)
    waiting += [clients[0].forward(data * 3, "cross_entropy"), clients[1].forward(data[:1], "cross_entropy")]
    until_asked(address, f"{clients[0].model_id}:2", KEYS[0])
    until_asked(address, f"{clients[1].model_id}:1", KEYS[1])
    gate.opened.set()
    assert all(future.result() for future in waiting)
    assert ended == [1, 1, 9]


@pytest.mark.parametrize("logits", [1, endpoint.LOGITS])  # rounds of one example, and of all
def test_a_request_that_fails_changes_nothing(
    tinker: Any, connect: Connect, monkeypatch: pytest.MonkeyPatch, logits: int
) -> None:
    monkeypatch.setattr(endpoint, "LOGITS", logits)
    data = [datum(tinker, text) for text in TEXTS]
    lost = datum(tinker, TEXTS[0], weights=torch.full((len(TEXTS[0]) - 1,), 3e38))
    found = []
    for failing in (False, True):
        training = connect().create_lora_training_client("tiny", rank=2, seed=1).result()
        training.forward_backward(data, "cross_entropy").result()
        if failing:
            with pytest.raises(tinker.RequestFailedError, match="400: the loss is inf or nan"):
                training.forward_backward([*data, lost], "cross_entropy").result()
        found.append(steps(tinker, training, 2))
    assert equal(*found)
