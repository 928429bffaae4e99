"""The official client, unchanged: its loop, its losses, its checkpoints, and what is refused."""

import contextlib
import json
import resource
import threading
import urllib.request
import warnings
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from torch import Tensor

from tenant import RemoteConfig
from tenant.model.loading import load_language_model
from tenant.tasks import Tasks
from tests.tenant.endpoint.tinker.conftest import KEYS, QUIET, TEXTS, data_of, equal, outputs, post, served, steps
from tests.waiting import beside

pytest.importorskip("tinker")
import tinker
from tinker.proto import tinker_public_pb2 as pb
from tinker.types import LoraConfig as LoraOptions

from tenant.endpoint.api.errors import ApiError
from tenant.endpoint.tinker.checkpoints import Checkpoints, Place
from tenant.endpoint.tinker.training import Training
from tenant.endpoint.tinker.wire import examples_of

pytestmark = QUIET


def fetched(address: str, training: Any, name: str) -> dict[str, bytes]:
    path = training.save_weights_external(name).result().path
    urls = tinker.RestClient(base_url=address, api_key=KEYS[0]).get_external_weights_urls(path).result().urls
    return {file: urllib.request.urlopen(url, timeout=60).read() for file, url in urls.items()}


def test_a_loop_trains_samples_and_saves(connect: Any, train: Any) -> None:
    training, data, losses = train(rank=4), data_of(TEXTS[:2]), []
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
    train: Any, address: str, checkpoint: Path, tmp_path: Path
) -> None:
    """The same bits as over `Tasks`, one example at a time. PEFT multiplies LoRA's matrices as matrices and `Tasks` as
    batches of matrices, so BLAS sums their terms in another order: each of a few hundred sums of at most 320 terms errs
    by 320 * 2^-24 of its terms, and Adam's steps of 0.01 pass the relative error on."""
    found = steps(training := train(rank=4))
    for name, content in fetched(address, training, "final").items():
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
        whole: Any = load_language_model(checkpoint, remote=RemoteConfig(masking="simulate"))
        downloaded = PeftModel.from_pretrained(whole, tmp_path)(input_ids=torch.tensor([TEXTS[2][:-1]])).logits[0]
    [trained] = outputs(training.forward(data_of(TEXTS[2:]), "cross_entropy").result())
    of_peft = downloaded.float().log_softmax(-1).gather(-1, torch.tensor(TEXTS[2][1:])[:, None])[:, 0]
    torch.testing.assert_close(trained, of_peft.detach(), rtol=320 * 2.0**-20, atol=0)
    expected = loop(model, [p for p in model.parameters() if p.requires_grad], contextlib.nullcontext)
    for ours, theirs in zip(found, expected, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=320 * 2.0**-20, atol=0)


def test_other_clients_and_keys_change_no_bit(train: Any) -> None:
    alone = steps(train(rank=4, seed=5))
    training = train(rank=4, seed=5)
    others = [train(key, rank=rank, seed=rank, train_attn=rank == 2) for key, rank in ((0, 2), (1, 3))]
    texts = [[9 + n, 8, n, 3, 2 * n] for n in range(9)]
    with beside(*(lambda other=other: steps(other, 4, texts) for other in others)):
        together = steps(training)
    assert equal(alone, together)


def test_a_request_in_chunks_is_computed_in_order(train: Any) -> None:
    training = train(rank=1, train_mlp=False)
    data = data_of([[n % 300, 1, n // 2] for n in range(260)])  # two chunks; the client sends one first
    forward = outputs(training.forward(data, "cross_entropy").result())
    assert len(forward) == 260
    assert torch.equal(forward[259], outputs(training.forward(data[259:], "cross_entropy").result())[0])


def test_a_custom_loss_has_the_gradients_of_the_same_built_in_loss(train: Any, address: str) -> None:
    def loss(data: Any, logprobs: list[Tensor]) -> tuple[Tensor, dict[str, float]]:
        weights = [one.loss_fn_inputs["weights"].to_torch() for one in data]
        return -sum((p * w).sum() for p, w in zip(logprobs, weights, strict=True)), {"custom:sum": 7.0}

    found, data = [], data_of()
    for custom in (False, True):
        training = train()
        if custom:
            assert training.forward_backward_custom(data, loss).result().metrics["custom:sum"] == 7
        else:
            training.forward_backward(data, "cross_entropy").result()
        training.optim_step(tinker.AdamParams(learning_rate=1e-3)).result()
        found.append(fetched(address, training, "one")["adapter_model.safetensors"])
    assert found[0] == found[1]


@pytest.mark.parametrize("name", ["importance_sampling", "ppo"])
def test_losses_of_reinforcement_learning_are_those_of_tinkers_documents(train: Any, name: str) -> None:
    training, size = train(train_unembed=False), len(TEXTS[2]) - 1
    old, advantages = torch.full((size,), -5.0), torch.linspace(-1, 1, size)
    data = data_of(TEXTS[2:], logprobs=old, advantages=advantages)
    found = training.forward_backward(data, name, {"clip_low_threshold": 0.7} if name == "ppo" else None).result()
    ratio = (outputs(found)[0] - old).exp()
    expected = ratio * advantages
    if name == "ppo":
        expected = torch.min(expected, ratio.clamp(0.7, 1.2) * advantages)
    assert found.metrics["loss:sum"] == pytest.approx(-float(expected.sum()), rel=1e-5)
    assert training.optim_step(tinker.AdamParams(learning_rate=1e-3)).result().metrics["grad_norm"] > 0


def test_checkpoints_continue_are_found_again_and_deleted(checkpoint: Path, tmp_path: Path) -> None:
    with served(checkpoint, tmp_path) as address, tinker.ServiceClient(base_url=address, api_key=KEYS[0]) as service:
        training = service.create_lora_training_client("tiny", rank=4, seed=1).result()
        steps(training)
        path = training.save_state("first").result().path
        second = training.save_state("second").result().path
        with pytest.raises(tinker.RequestFailedError, match="already"):
            training.save_state("first").result()
        expected = steps(training)
        training.save_weights_for_sampler("s").result()
        training.save_weights_and_get_sampling_client().result()
        rest, other = (tinker.RestClient(base_url=address, api_key=key) for key in KEYS)
        listed = rest.list_checkpoints(training.model_id).result().checkpoints
        assert [one.checkpoint_id for one in listed] == ["sampler_weights/s", "weights/second", "weights/first"]
        assert other.list_user_checkpoints().result().checkpoints == []
        [page] = rest.list_user_checkpoints(limit=1, offset=1).result().checkpoints
        assert page.tinker_path == second
    with (  # another process would find the same
        served(checkpoint, tmp_path) as address,
        tinker.ServiceClient(base_url=address, api_key=KEYS[0]) as service,
        tinker.ServiceClient(base_url=address, api_key=KEYS[1]) as stranger,
    ):
        assert not list(tmp_path.glob("*/*/snapshots"))
        with pytest.raises(tinker.NotFoundError, match="no checkpoint"):
            stranger.create_training_client_from_state(path).result()
        anew = service.create_training_client_from_state(path).result()
        assert anew.get_info().lora_rank == 4
        assert not equal(expected, steps(anew))
        tinker.RestClient(base_url=address, api_key=KEYS[0]).delete_checkpoint_from_tinker_path(path).result()
        with pytest.raises(tinker.NotFoundError):
            service.create_training_client_from_state(path).result()
        again = service.create_training_client_from_state_with_optimizer(second).result()
        assert equal(expected, steps(again))
        again.load_state_with_optimizer(second).result()
        assert equal(expected, steps(again))
        sampler = service.create_sampling_client(path.replace("weights/first", "sampler_weights/s")).result()
        assert sampler.compute_logprobs(tinker.ModelInput.from_ints([1, 2])).result()[1] < 0
    with (  # another model of the same sizes, in the same folder
        served(checkpoint, tmp_path, name="other") as address,
        tinker.ServiceClient(base_url=address, api_key=KEYS[0]) as service,
    ):
        training = service.create_lora_training_client("other", rank=4).result()
        with pytest.raises(tinker.BadRequestError, match="no model 'tiny'"):
            training.load_state(second).result()


def test_a_full_disk_loses_nothing_and_names_itself(
    connect: Any, train: Any, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    training, sizes, save = train(rank=16), list[int](), Checkpoints.save
    steps(training)

    def saved(checkpoints: Checkpoints, place: Place, write: Any, size: int, **about: Any) -> None:
        sizes.insert(0, size)
        save(checkpoints, place, write, size, **about)

    monkeypatch.setattr(Checkpoints, "save", saved)
    path = training.save_state("before").result().path
    training.save_weights_for_sampler("before").result()
    listed = (
        tinker.RestClient(base_url=address, api_key=KEYS[0]).list_checkpoints(training.model_id).result().checkpoints
    )
    for size, checkpoint in zip(sizes, listed, strict=True):  # known before, but for names and settings
        assert 0.9 * checkpoint.size_bytes < size < checkpoint.size_bytes
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, hard))
    try:
        with pytest.raises(tinker.RequestFailedError, match=r"507: cannot write .* are as before"):
            training.save_state("full").result()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    expected = steps(training)
    assert equal(expected, steps(connect().create_training_client_from_state_with_optimizer(path).result()))
    assert training.save_state("full").result()


def test_one_key_cannot_exhaust_memory(train: Any, address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither with large ranks, whose memory is not taken, nor with many training clients or examples."""
    training = train(rank=1, train_mlp=False)
    with monkeypatch.context() as patched:
        patched.setattr(Training, "_targets", lambda *_: {"model.layers.0.mlp.up_proj": 1 << 40})
        patched.setattr(Tasks, "register", lambda *_: pytest.fail("memory was taken"))
        with pytest.raises(tinker.RequestFailedError, match="takes"):
            train(rank=8)
    for wrong, named in (({"rank": 0}, "rank 0"), ({"rank": 2**70}, "takes"), ({"seed": 2**64}, "400: the seed")):
        with pytest.raises(tinker.RequestFailedError, match=named):
            train(**wrong)
    monkeypatch.setattr("tenant.endpoint.tinker.wire._MOST_EXAMPLES", 2)
    data = data_of()
    with pytest.raises(tinker.BadRequestError, match="3 examples"):
        training.forward(data, "cross_entropy").result()
    assert training.forward(data[:2], "cross_entropy").result().loss_fn_outputs


@pytest.fixture
def kept(tmp_path: Path) -> Checkpoints:
    return Checkpoints(tmp_path, cast(Tasks, {}), owners=1)


ABOUT: Any = {"base_model": "tiny", "lora": LoraOptions(rank=1)}
RUN = f"tinker://{'0' * 32}:train:0"


def test_readers_do_not_wait_for_a_checkpoint_that_is_written(kept: Checkpoints) -> None:
    place = kept.place("a" * 16, f"{RUN}/weights/one")
    kept.save(place, lambda _: None, 0, **ABOUT)
    writing, read = threading.Event(), threading.Event()

    def write(folder: Path) -> None:
        writing.set()
        assert read.wait(60)

    with beside(lambda: kept.save(place._replace(name="two"), write, 0, **ABOUT)):
        assert writing.wait(60)
        assert [one for one, _ in kept.all("*")] == [place]
        kept.delete(place)
        read.set()
    assert [one.name for one, _ in kept.all("*")] == ["two"]


def test_time_to_live_ends_a_checkpoint_and_no_other_file(kept: Checkpoints) -> None:
    place = kept.place("a" * 16, f"{RUN}/weights/one")
    kept.save(place, lambda _: None, 0, **ABOUT, expires_at=datetime.now(UTC))
    foreign = kept.folder(place._replace(name="foreign")) / "file"
    foreign.parent.mkdir(parents=True)
    foreign.touch()
    with pytest.raises(ApiError, match="no checkpoint"):
        kept.record(place)
    assert list(kept.all("*")) == []
    assert not kept.folder(place).exists()
    assert foreign.exists()


def test_names_and_paths_cannot_leave_the_folder(kept: Checkpoints) -> None:
    names = ("../x", "a/b", ".hidden", "..", "a\\b", "x" * 65, "weights\n", "", "é")
    paths = ("../weights/x", "x/../y", "/weights/x", "a/b", "a/weights/b", f"{'0' * 32}:train:0/snapshots/0")
    for uri in (*(f"{RUN}/weights/{name}" for name in names), *(f"tinker://{path}" for path in paths)):
        with pytest.raises(ApiError, match="write a checkpoint"):
            kept.place("a" * 16, uri)


def test_a_key_has_its_part_of_the_disk(kept: Checkpoints) -> None:
    """What would exceed it is not written; the other keys have theirs."""
    kept.limit = 150
    first = kept.place("a" * 16, f"{RUN}/weights/one")
    for place in (first, first._replace(owner="b" * 16)):
        kept.save(place, lambda folder: (folder / "file").write_bytes(bytes(100)), 100, **ABOUT)
    with pytest.raises(ApiError, match="exceed 150 bytes") as refused:
        kept.save(first._replace(name="two"), lambda _: pytest.fail("it was written"), 51, **ABOUT)
    assert refused.value.status == 507
    assert [one.name for one, _ in kept.all("*")] == ["one", "one"]


def test_the_newest_snapshots_of_a_training_client_are_kept(kept: Checkpoints) -> None:
    """Whatever their names: a request without a sequence number has none."""
    first = kept.place("a" * 16, f"{RUN}/weights/one")._replace(kind="snapshots")
    kept.save(first._replace(run=first.run + "1", name="0"), lambda _: None, 0, **ABOUT)
    for name in ("None", *map(str, range(9))):
        kept.save(first._replace(name=name), lambda _: None, 0, **ABOUT)
    assert sorted(one.name for one, _ in kept.all("*") if one.run == first.run) == [*map(str, range(1, 9))]
    kept.forget_snapshots(first.owner, first.run, keep=0)
    assert [one.run for one, _ in kept.all("*")] == [first.run + "1"]


def test_options_that_an_earlier_client_sends_are_read() -> None:
    message = pb.ForwardBackwardRequest(loss_fn="ppo", loss_fn_config={"clip_low": 0.7})
    with pytest.raises(ApiError, match="clip_low is no option"):
        examples_of(message, vocabulary=9, longest=9)


def test_what_is_not_offered_is_refused_by_name(connect: Any, train: Any, address: str) -> None:
    """A refused request has a number of its own, and no later one waits for it."""
    service, training = connect(), train(rank=1, train_mlp=False)
    data, rest = data_of(), tinker.RestClient(base_url=address, api_key=KEYS[0])
    sampler = service.create_sampling_client(base_model="tiny").result()
    image = tinker.ModelInput(chunks=[tinker.types.ImageChunk(data=b"x", format="png")])
    hot, params = tinker.SamplingParams(temperature=-1), tinker.SamplingParams(max_tokens=1)
    path = "tinker://a/weights/b"
    wrong = data_of(TEXTS[:1], advantages=torch.ones(4)), data_of([[1, 9999]])
    refused: dict[str, Callable[[], Any]] = {
        "cispo": lambda: training.forward_backward(data, "cispo"),
        "beta": lambda: training.forward_backward(data, "cross_entropy", {"beta": 1.0}),
        "clip_low_threshold": lambda: training.forward_backward(data, "ppo", {"clip_low_threshold": "0.9"}),
        "advantages": lambda: training.forward_backward(wrong[0], "cross_entropy"),
        "vocabulary": lambda: training.forward_backward(wrong[1], "cross_entropy"),
        "dimuon": lambda: training.optim_step(tinker.types.DimuonParams(learning_rate=0.1)),
        "kind": lambda: training.save_weights_and_get_sampling_client(kind="inflight"),
        "no model 'one'": lambda: service.create_lora_training_client("one"),
        "limit": lambda: rest.list_user_checkpoints(limit=-1),
        "publish": lambda: rest.publish_checkpoint_from_tinker_path(path),
        "ttl": lambda: rest.set_checkpoint_ttl_from_tinker_path(path, 4000),
        "training_runs": lambda: rest.get_training_run("a"),
        "overwrite": lambda: training.save_state("a", overwrite=True),
        "age_encryption": lambda: training.save_weights_external("a", age_encryption_recipients=["age1"]),
        "write a checkpoint": lambda: training.save_state("../a"),
        "no model 'two'": lambda: service.create_sampling_client(base_model="two"),
        "image": lambda: sampler.sample(image, 1, params),
        "temperature": lambda: sampler.sample(tinker.ModelInput.from_ints([1]), 1, hot),
        "9999 is not a token": lambda: sampler.sample(tinker.ModelInput.from_ints([9999]), 1, params),
        "logprobs": lambda: sampler.sample(tinker.ModelInput.from_ints([1]), 1, params, topk_sample_logprobs=21),
    }
    for name, call in refused.items():
        with pytest.raises((tinker.BadRequestError, tinker.NotFoundError), match=name):
            call().result()
    large = tinker.TensorData.from_torch(torch.ones(1, (8 << 20) // 4 + 1))
    with pytest.raises(tinker.APIStatusError, match="exceeds") as status:
        training.forward(data_of([[1, 2]], weights=large), "cross_entropy").result(timeout=60)
    assert status.value.status_code == 413
    assert training.forward(data, "cross_entropy").result(timeout=60).loss_fn_outputs
    assert [one.model_name for one in service.get_server_capabilities().supported_models] == ["tiny"]
    later = {"model_id": training.model_id, "adam_params": {}, "type": "optim_step"}
    assert post(address, "optim_step", {**later, "seq_id": 99})[0] == 200
    assert post(address, "optim_step", {**later, "seq_id": 98})[0] == 400
    assert post(address, "optim_step", {"model_id": training.model_id, "adam_params": 3})[0] == 400
    assert post(address, "forward_backward", {"no": "protocol buffer"})[0] == 400
