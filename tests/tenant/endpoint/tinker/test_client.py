"""The official client, unchanged: its loop, its losses, its checkpoints, and what is refused."""

import contextlib
import json
import resource
import threading
import urllib.error
import urllib.request
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from torch import Tensor

from tenant import RemoteConfig
from tenant.model.loading import load_language_model
from tenant.tasks import Tasks
from tests.tenant.endpoint.tinker.conftest import KEYS, served
from tests.waiting import beside

pytest.importorskip("tinker")
from tinker.proto.request_conv import forward_backward_request_to_proto
from tinker.types import LoraConfig as LoraOptions

from tenant.endpoint.api.errors import ApiError
from tenant.endpoint.tinker.checkpoints import Checkpoints, Record
from tenant.endpoint.tinker.futures import Futures
from tenant.endpoint.tinker.training import Training
from tenant.endpoint.tinker.wire import examples_of

QUIET = [  # the client leaves a connection open
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore:DEPRECATED:FutureWarning"),
]
pytestmark = QUIET
Connect = Callable[..., Any]
TEXTS = [[5, 9, 7, 11, 3], [8, 2, 4], [100, 40, 6, 6, 1, 90, 17]]


def datum(tinker: Any, tokens: list[int], **inputs: Any) -> Any:
    if not inputs:
        inputs = {"weights": torch.linspace(0.5, 1, len(tokens) - 1)}
    return tinker.Datum(
        model_input=tinker.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": torch.tensor(tokens[1:]), **inputs},
    )


def steps(tinker: Any, training: Any, count: int = 3, texts: list[list[int]] = TEXTS) -> list[list[Tensor]]:
    """Log probabilities of each step."""
    found = []
    for _ in range(count):
        forward = training.forward_backward([datum(tinker, text) for text in texts], "cross_entropy")
        adam = tinker.AdamParams(learning_rate=1e-2, weight_decay=0.01, grad_clip_norm=1.0)
        training.optim_step(adam).result()
        found.append([one["logprobs"].to_torch() for one in forward.result().loss_fn_outputs])
    return found


def fetched(tinker: Any, address: str, path: str, key: str = KEYS[0]) -> dict[str, bytes]:
    urls = tinker.RestClient(base_url=address, api_key=key).get_external_weights_urls(path).result().urls
    found = {}
    for name, url in urls.items():
        with urllib.request.urlopen(url, timeout=60) as answer:
            found[name] = answer.read()
    return found


def equal(first: list[list[Tensor]], second: list[list[Tensor]]) -> bool:
    return all(torch.equal(a, b) for one, two in zip(first, second, strict=True) for a, b in zip(one, two, strict=True))


def test_a_loop_trains_samples_and_saves(tinker: Any, connect: Connect) -> None:
    training = connect().create_lora_training_client("tiny", rank=4, seed=1).result()
    data = [datum(tinker, text) for text in TEXTS[:2]]
    losses = []
    for _ in range(30):
        forward = training.forward_backward(data, "cross_entropy")
        step = training.optim_step(tinker.AdamParams(learning_rate=3e-3))
        losses.append(forward.result().metrics["loss:sum"])
        assert step.result().metrics["grad_norm"] > 0
    assert losses[-1] < losses[0] / 2
    assert training.get_tokenizer().vocab_size > 200
    sampler = training.save_weights_and_get_sampling_client().result()
    params = tinker.SamplingParams(max_tokens=3, temperature=0.0, stop=[])
    prompt = tinker.ModelInput.from_ints([5, 9])
    answer = sampler.sample(prompt, 2, params, include_prompt_logprobs=True, topk_prompt_logprobs=2).result()
    assert [list(one.tokens) for one in answer.sequences] == [[7, 11, 3]] * 2
    assert answer.prompt_logprobs[0] is None
    [_, top] = answer.topk_prompt_logprobs
    assert len(top) == 2
    assert top[0][1] >= answer.prompt_logprobs[1]
    # a stop token is part of the tokens, with its log probability
    params = tinker.SamplingParams(max_tokens=9, temperature=0.0, stop=[11])
    [stopped] = sampler.sample(prompt, 1, params, topk_sample_logprobs=3).result().sequences
    assert (list(stopped.tokens), stopped.stop_reason, len(stopped.logprobs)) == ([7, 11], "stop", 2)
    assert stopped.topk_logprobs[1][0] == (11, pytest.approx(stopped.logprobs[1]))
    seeded = tinker.SamplingParams(max_tokens=5, seed=3)
    [a, b] = [sampler.sample(prompt, 2, seeded).result().sequences for _ in range(2)]
    assert [one.tokens for one in a] == [one.tokens for one in b]
    assert a[0].tokens != a[1].tokens
    base = connect().create_sampling_client(base_model="tiny").result()
    assert base.compute_logprobs(prompt).result()[1] != answer.prompt_logprobs[1]


def loop(model: Any, parameters: list[Any], batch: Callable[[], Any]) -> list[list[Tensor]]:
    """What `steps` computes, one example after the other."""
    optimizer = torch.optim.AdamW(parameters, lr=1e-2, betas=(0.9, 0.95), eps=1e-12, weight_decay=0.01, foreach=False)
    found = []
    for _ in range(3):
        logprobs = []
        for text in TEXTS:
            with batch():
                logits = model(input_ids=torch.tensor([text[:-1]]), use_cache=False).logits[0].float().log_softmax(-1)
                logprobs.append(logits.gather(-1, torch.tensor(text[1:])[:, None])[:, 0])
                (-(logprobs[-1] * torch.linspace(0.5, 1, len(text) - 1)).sum()).backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        found.append([one.detach() for one in logprobs])
    return found


def test_losses_are_those_of_the_same_loop_over_tasks_and_over_peft(
    tinker: Any, connect: Connect, address: str, checkpoint: Path, tmp_path: Path
) -> None:
    """The same bits as over `Tasks`, one example at a time. PEFT multiplies LoRA's matrices as matrices and `Tasks` as
    batches of matrices, so BLAS sums their terms in another order: each of a few hundred sums of at most 320 terms errs
    by 320 * 2^-24 of its terms, and Adam's steps of 0.01 pass the relative error on."""
    training = connect().create_lora_training_client("tiny", rank=4, seed=1).result()
    found = steps(tinker, training)
    path = training.save_weights_external("final").result().path
    for name, content in fetched(tinker, address, path).items():
        (tmp_path / name).write_bytes(content)
    targets = json.loads((tmp_path / "adapter_config.json").read_text())["target_modules"]
    lora = LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=32, target_modules=targets)
    model: Any = load_language_model(checkpoint, remote=RemoteConfig(masking="simulate"))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Model")  # the head is tied
        tasks = Tasks(model)
        tasks.register("one", lora)
        torch.manual_seed(1)
        tasks.load("one")
        assert equal(found, loop(model, list(tasks.parameters("one")), lambda: tasks.batch(["one"])))
        saved = load_file(tmp_path / "adapter_model.safetensors")
        tasks.save("one", tmp_path / "own")
        own = load_file(tmp_path / "own" / "adapter_model.safetensors")
        assert saved.keys() == own.keys()
        assert all(torch.equal(saved[key], own[key]) for key in saved)
        tasks.close()
        torch.manual_seed(1)
        model = get_peft_model(load_language_model(checkpoint, remote=RemoteConfig(masking="simulate")), lora)
    expected = loop(model, [p for p in model.parameters() if p.requires_grad], contextlib.nullcontext)
    for ours, theirs in zip(found, expected, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=320 * 2.0**-20, atol=0)


def test_other_clients_and_keys_change_no_bit(tinker: Any, connect: Connect) -> None:
    alone = steps(tinker, connect().create_lora_training_client("tiny", rank=4, seed=5).result())
    training = connect().create_lora_training_client("tiny", rank=4, seed=5).result()
    others = [
        connect(key).create_lora_training_client("tiny", rank=rank, seed=rank, train_attn=rank == 2).result()
        for key, rank in ((0, 2), (1, 3))
    ]
    texts = [[9 + n, 8, n, 3, 2 * n] for n in range(9)]
    works = [threading.Thread(target=steps, args=(tinker, other, 4, texts)) for other in others]
    for work in works:
        work.start()
    together = steps(tinker, training)
    for work in works:
        work.join(60)
    assert equal(alone, together)


def test_a_request_in_chunks_is_computed_in_order(tinker: Any, connect: Connect) -> None:
    training = connect().create_lora_training_client("tiny", rank=1, seed=1, train_mlp=False).result()
    data = [datum(tinker, [n % 300, 1, n // 2]) for n in range(260)]  # two chunks, of which the client sends one first
    forward = training.forward(data, "cross_entropy").result()
    one = training.forward(data[259:], "cross_entropy").result()
    assert len(forward.loss_fn_outputs) == 260
    assert torch.equal(
        forward.loss_fn_outputs[259]["logprobs"].to_torch(), one.loss_fn_outputs[0]["logprobs"].to_torch()
    )


def test_a_custom_loss_has_the_gradients_of_the_same_built_in_loss(tinker: Any, connect: Connect, address: str) -> None:
    def loss(data: Any, logprobs: list[Tensor]) -> tuple[Tensor, dict[str, float]]:
        weights = [one.loss_fn_inputs["weights"].to_torch() for one in data]
        return -sum((p * w).sum() for p, w in zip(logprobs, weights, strict=True)), {"custom:sum": 7.0}

    found = []
    for custom in (False, True):
        training = connect().create_lora_training_client("tiny", rank=2, seed=1).result()
        data = [datum(tinker, text) for text in TEXTS]
        if custom:
            assert training.forward_backward_custom(data, loss).result().metrics["custom:sum"] == 7
        else:
            training.forward_backward(data, "cross_entropy").result()
        training.optim_step(tinker.AdamParams(learning_rate=1e-3)).result()
        path = training.save_weights_external("one").result().path
        found.append(fetched(tinker, address, path)["adapter_model.safetensors"])
    assert found[0] == found[1]


@pytest.mark.parametrize("name", ["importance_sampling", "ppo"])
def test_losses_of_reinforcement_learning_are_those_of_tinkers_documents(
    tinker: Any, connect: Connect, name: str
) -> None:
    training = connect().create_lora_training_client("tiny", rank=2, seed=1, train_unembed=False).result()
    size = len(TEXTS[2]) - 1
    old, advantages = torch.full((size,), -5.0), torch.linspace(-1, 1, size)
    data = [datum(tinker, TEXTS[2], logprobs=old, advantages=advantages)]
    config = {"clip_low_threshold": 0.7} if name == "ppo" else None
    found = training.forward_backward(data, name, config).result()
    p = found.loss_fn_outputs[0]["logprobs"].to_torch()
    ratio = (p - old).exp()
    clipped = ratio.clamp(0.7, 1.2)
    expected = {
        "importance_sampling": -(ratio * advantages).sum(),
        "ppo": -torch.min(ratio * advantages, clipped * advantages).sum(),
    }[name]
    assert found.metrics["loss:sum"] == pytest.approx(float(expected), rel=1e-5)
    assert training.optim_step(tinker.AdamParams()).result().metrics["grad_norm"] > 0


def test_checkpoints_continue_are_found_again_and_deleted(tinker: Any, checkpoint: Path, tmp_path: Path) -> None:
    with served(checkpoint, tmp_path) as address, tinker.ServiceClient(base_url=address, api_key=KEYS[0]) as service:
        training = service.create_lora_training_client("tiny", rank=4, seed=1).result()
        steps(tinker, training)
        path = training.save_state("first").result().path
        expected = steps(tinker, training)
        with pytest.raises(tinker.RequestFailedError, match="already"):
            training.save_state("first").result()
        training.save_state("second").result()
        training.save_weights_for_sampler("s").result()
        training.save_weights_and_get_sampling_client().result()
        rest = tinker.RestClient(base_url=address, api_key=KEYS[0])
        other = tinker.RestClient(base_url=address, api_key=KEYS[1])
        listed = rest.list_checkpoints(training.model_id).result().checkpoints
        assert [one.checkpoint_id for one in listed] == ["sampler_weights/s", "weights/second", "weights/first"]
        assert other.list_user_checkpoints().result().checkpoints == []
        [page] = rest.list_user_checkpoints(limit=1, offset=1).result().checkpoints
        assert page.tinker_path == listed[1].tinker_path
    with (  # another process would find the same
        served(checkpoint, tmp_path) as address,
        tinker.ServiceClient(base_url=address, api_key=KEYS[0]) as service,
        tinker.ServiceClient(base_url=address, api_key=KEYS[1]) as stranger,
    ):
        assert not list(tmp_path.glob("*/*/snapshots"))
        with pytest.raises(tinker.NotFoundError, match="no checkpoint"):
            stranger.create_training_client_from_state(path).result()
        weights = service.create_training_client_from_state(path).result()
        assert weights.get_info().lora_rank == 4
        rest = tinker.RestClient(base_url=address, api_key=KEYS[0])
        rest.delete_checkpoint_from_tinker_path(path).result()
        with pytest.raises(tinker.NotFoundError):
            service.create_training_client_from_state(path).result()
        again = service.create_training_client_from_state_with_optimizer(path.replace("first", "second")).result()
        again.load_state_with_optimizer(path.replace("first", "second")).result()
        assert expected
        sampler = service.create_sampling_client(path.replace("weights/first", "sampler_weights/s")).result()
        assert (
            len(
                sampler.sample(tinker.ModelInput.from_ints([1]), 1, tinker.SamplingParams(max_tokens=1))
                .result()
                .sequences
            )
            == 1
        )


def test_an_optimizers_state_continues_with_the_same_bits(tinker: Any, connect: Connect) -> None:
    service = connect()
    training = service.create_lora_training_client("tiny", rank=4, seed=1).result()
    steps(tinker, training)
    path = training.save_state("here").result().path
    expected = steps(tinker, training)
    again = service.create_training_client_from_state_with_optimizer(path).result()
    assert equal(expected, steps(tinker, again))
    anew = service.create_training_client_from_state(path).result()
    assert not equal(expected, steps(tinker, anew))


def test_a_full_disk_loses_nothing_and_names_itself(tinker: Any, connect: Connect) -> None:
    service = connect()
    training = service.create_lora_training_client("tiny", rank=16, seed=1).result()
    steps(tinker, training)
    path = training.save_state("before").result().path
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, hard))
    try:
        with pytest.raises(tinker.RequestFailedError, match=r"507: cannot write .* are as before"):
            training.save_state("full").result()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    expected = steps(tinker, training)
    assert equal(expected, steps(tinker, service.create_training_client_from_state_with_optimizer(path).result()))
    assert training.save_state("full").result()


def test_one_key_cannot_exhaust_memory(tinker: Any, connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither with large ranks, whose memory is not taken, nor with many training clients or examples."""
    service = connect()
    training = service.create_lora_training_client("tiny", rank=1, train_mlp=False).result()
    with monkeypatch.context() as patched:
        patched.setattr(Training, "_targets", lambda *_: {"model.layers.0.mlp.up_proj": 1 << 40})
        patched.setattr(Tasks, "register", lambda *_: pytest.fail("memory was taken"))
        with pytest.raises(tinker.RequestFailedError, match="would take"):
            service.create_lora_training_client("tiny", rank=8).result()
    with pytest.raises(tinker.RequestFailedError, match="rank 513"):
        service.create_lora_training_client("tiny", rank=513).result()
    one = datum(tinker, [1, 2, 3])
    message = forward_backward_request_to_proto(
        tinker.types.ForwardBackwardRequest(
            model_id=training.model_id,
            seq_id=1,
            forward_backward_input=tinker.types.ForwardBackwardInput(data=[one] * 257, loss_fn="cross_entropy"),
        )
    )
    with pytest.raises(ApiError, match="257 examples"):
        examples_of(message, vocabulary=320, longest=8)
    assert training.forward([one], "cross_entropy").result().loss_fn_outputs


def test_the_futures_of_a_key_take_bounded_memory() -> None:
    futures = Futures()
    for number in range(3):
        future = futures.new("a", f"{number}", 100 << 20) if number < 2 else futures.new("b", "2", 100 << 20)
        futures.keep("ab"[number // 2], future)
    with pytest.raises(ApiError, match="no result yet"):
        futures.new("a", "3", 100 << 20)
    with pytest.raises(ApiError, match="would take"):
        futures.new("a", "3", 1 << 30)
    first = futures.find("a", "0")
    assert first is not None
    first.set(bytes(90 << 20))
    futures.keep("a", futures.new("a", "3", 100 << 20))
    assert [futures.find("a", id) is None for id in "013"] == [True, False, False]


@pytest.fixture
def kept(tmp_path: Path) -> Iterator[Checkpoints]:
    found = Checkpoints(tmp_path, cast(Tasks, {}), owners=1)
    yield found
    found.close()


def test_readers_do_not_wait_for_a_checkpoint_that_is_written(kept: Checkpoints) -> None:
    place = kept.place("a" * 16, f"{'0' * 32}:train:0", "weights", "one")
    record = Record(base_model="tiny", lora=LoraOptions(rank=1), time=1)
    kept.save(place, record, lambda _: None, size=0)
    writing, read = threading.Event(), threading.Event()

    def write(folder: Path) -> None:
        writing.set()
        assert read.wait(60)

    with beside(lambda: kept.save(place._replace(name="two"), record, write, size=0)):
        assert writing.wait(60)
        assert [one for one, _ in kept.all("*")] == [place]
        kept.delete(place)
        read.set()
    assert [one.name for one, _ in kept.all("*")] == ["two"]


def test_time_to_live_ends_a_checkpoint_and_no_other_file(kept: Checkpoints, tmp_path: Path) -> None:
    place = kept.place("a" * 16, f"{'0' * 32}:train:0", "weights", "one")
    kept.save(place, Record(base_model="tiny", lora=LoraOptions(rank=1), time=1, expires=2), lambda _: None, size=0)
    foreign = kept.folder(place._replace(name="foreign")) / "file"
    foreign.parent.mkdir()
    foreign.touch()
    with pytest.raises(ApiError, match="no checkpoint"):
        kept.record(place)
    assert list(kept.all("*")) == []
    assert not kept.folder(place).exists()
    assert foreign.exists()


@pytest.mark.parametrize("name", ["../x", "a/b", ".hidden", "..", "a\\b", "x" * 65, "weights\n", "", "é"])
def test_names_cannot_leave_the_folder(tinker: Any, connect: Connect, name: str) -> None:
    training = connect().create_lora_training_client("tiny", rank=1, train_mlp=False, train_unembed=False).result()
    with pytest.raises(tinker.BadRequestError, match="not a task name"):
        training.save_state(name).result()
    assert training.save_state("ok").result()  # its number counts as used


@pytest.mark.parametrize(
    "path", ["tinker://../weights/x", "tinker://x/../y", "file:///etc/passwd", "tinker:///weights/x", "tinker://a/b"]
)
def test_paths_cannot_leave_the_folder(tinker: Any, connect: Connect, path: str) -> None:
    with pytest.raises((tinker.NotFoundError, tinker.BadRequestError)):
        connect().create_training_client_from_state(path).result()


def test_what_is_not_offered_is_refused_by_name(tinker: Any, connect: Connect, address: str) -> None:
    service = connect()
    training = service.create_lora_training_client("tiny", rank=1, train_mlp=False).result()
    data, rest = [datum(tinker, [1, 2, 3])], tinker.RestClient(base_url=address, api_key=KEYS[0])
    refused: list[tuple[Callable[[], Any], str]] = [
        (lambda: training.forward_backward(data, "cispo"), "cispo"),
        (lambda: training.forward_backward(data, "cross_entropy", {"beta": 1.0}), "beta"),
        (
            lambda: training.forward_backward([datum(tinker, [1, 2], advantages=torch.ones(1))], "cross_entropy"),
            "advant",
        ),
        (lambda: training.forward_backward([datum(tinker, [1, 9999])], "cross_entropy"), "vocabulary"),
        (lambda: training.optim_step(tinker.types.DimuonParams(learning_rate=0.1)), "dimuon"),
        (lambda: training.save_weights_and_get_sampling_client(kind="inflight"), "kind"),
        (lambda: service.create_lora_training_client("other"), "other"),
        (lambda: rest.publish_checkpoint_from_tinker_path("tinker://a/weights/b"), "publish"),
        (lambda: rest.set_checkpoint_ttl_from_tinker_path("tinker://a/weights/b", 4000), "ttl"),
        (lambda: rest.get_training_run("a"), "training_runs"),
        (lambda: training.save_state("a", overwrite=True), "overwrite"),
        (
            lambda: training.save_weights_external("a", age_encryption_recipients=["age1"]),
            "age_encryption_recipients",
        ),
        (lambda: service.create_sampling_client(base_model="other"), "other"),
    ]
    for call, name in refused:
        with pytest.raises((tinker.BadRequestError, tinker.NotFoundError), match=name):
            call().result()
    assert training.forward(data, "cross_entropy").result().loss_fn_outputs
    image = tinker.ModelInput(chunks=[tinker.types.ImageChunk(data=b"x", format="png")])
    sampler = service.create_sampling_client(base_model="tiny").result()
    with pytest.raises(tinker.BadRequestError, match="image"):
        sampler.sample(image, 1, tinker.SamplingParams(max_tokens=1)).result()
    assert [one.model_name for one in service.get_server_capabilities().supported_models] == ["tiny"]
    assert post(address, "get_info", {"model_id": training.model_id}, "tml-other")[0] == 401


def test_a_refused_request_does_not_delay_the_next_one(tinker: Any, connect: Connect, address: str) -> None:
    """Its number is missing then, and no later request waits for it."""
    training = connect().create_lora_training_client("tiny", rank=1, train_mlp=False).result()
    data = [datum(tinker, [1, 2, 3])]
    large = tinker.Datum(
        model_input=tinker.ModelInput.from_ints([1]),
        loss_fn_inputs={"target_tokens": torch.ones(1, (8 << 20) // 4 + 1)},
    )
    with pytest.raises(tinker.APIStatusError, match="exceeds") as refused:
        training.forward([large], "cross_entropy").result(timeout=60)
    assert refused.value.status_code == 413
    assert training.forward(data, "cross_entropy").result(timeout=60).loss_fn_outputs
    later = {"model_id": training.model_id, "adam_params": {}, "type": "optim_step"}
    assert post(address, "optim_step", {**later, "seq_id": 9})[0] == 200
    assert post(address, "optim_step", {**later, "seq_id": 8})[0] == 400
    assert post(address, "optim_step", {"model_id": training.model_id, "adam_params": 3})[0] == 400
    assert post(address, "forward_backward", {"no": "protocol buffer"})[0] == 400


def test_a_fault_of_the_endpoint_ends_its_request(
    tinker: Any, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> bytes:
        raise OSError

    training = connect().create_lora_training_client("tiny", rank=1, train_mlp=False).result()
    data = [datum(tinker, [1, 2, 3])]
    with monkeypatch.context() as patched:
        patched.setattr("tenant.endpoint.tinker.training.outputs_message", broken)
        with pytest.raises(tinker.RequestFailedError, match="OSError"):
            training.forward(data, "cross_entropy").result(timeout=60)
    assert training.forward(data, "cross_entropy").result(timeout=60).loss_fn_outputs


def post(address: str, route: str, body: dict[str, Any], key: str = KEYS[0]) -> tuple[int, bytes]:
    headers = {"X-API-Key": key, "Content-Type": "application/json"}
    request = urllib.request.Request(f"{address}/api/v1/{route}", json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


def test_results_are_fetched_by_the_key_that_asked_as_often_as_it_likes(
    tinker: Any, connect: Connect, address: str
) -> None:
    training = connect().create_lora_training_client("tiny", rank=1, train_mlp=False).result()
    training.forward([datum(tinker, [1, 2, 3])], "cross_entropy").result()
    request = {"request_id": f"{training.model_id}:1"}
    first, second = (post(address, "retrieve_future", request) for _ in range(2))
    assert first == second
    assert first[0] == 200
    assert post(address, "retrieve_future", request, KEYS[1])[0] == 410
    assert post(address, "get_info", {"model_id": training.model_id}, KEYS[1])[0] == 404
    assert post(address, "retrieve_future", {"request_id": "x"})[0] == 410
