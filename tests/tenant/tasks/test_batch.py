"""A batch of rows of several tasks is each task alone."""

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import peft
import pytest
import torch
from hypothesis import example, given, settings, strategies as st
from peft import LNTuningConfig, LoraConfig, PeftModel, PromptTuningConfig
from torch import Tensor, nn
from transformers import LlamaForSequenceClassification

from symbiosis_priv.errors import TaskError, UnsupportedMethodError, UnsupportedModelError
from symbiosis_priv.native import linear
from tenant import RemoteConfig, backend_of
from tenant.model.loading import load_model
from tenant.tasks import row_blocks
from tenant.tasks.adapter import NAME
from tenant.tasks.batch import BASE
from tenant.tasks.operators import operator_key
from tenant.tasks.registry import Tasks
from tests.adapters import METHODS, peft_config, write_adapter
from tests.builds import BUILDS, TORCH, build as using
from tests.cases import table
from tests.compatibility.families import build

TOKENS = 7
NAMES = st.sampled_from([*METHODS, BASE])


def ids(rows: int, *, tokens: int = TOKENS, seed: int = 0) -> Tensor:
    return torch.randint(1, 96, (rows, tokens), generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def exact(llama: Path, folders: Path) -> Iterator[Tasks]:
    """The whole model in float64: what is left of rounding cannot hide a wrong operator."""
    tasks = Tasks(load_model(llama, dtype=torch.float64))
    tasks.register_all(folders)
    yield tasks
    tasks.close()


@pytest.fixture(scope="module")
def split(llama: Path, folders: Path) -> Iterator[Tasks]:
    """The split model: products in the ring."""
    model = load_model(llama, remote=RemoteConfig(masking="simulate"), dtype=torch.float32)
    tasks = Tasks(model)
    tasks.register_all(folders)
    yield tasks
    tasks.close()


@pytest.fixture(scope="module")
def alone(llama: Path, folders: Path) -> Callable[[str], Any]:
    """`alone(name)`: PEFT's own model of one task, on a copy of the base model made before any task was loaded."""
    base = load_model(llama, dtype=torch.float64)
    models: dict[str, Any] = {BASE: base}

    def one(name: str) -> Any:
        if name not in models:
            models[name] = PeftModel.from_pretrained(
                copy.deepcopy(base), str(folders / name), is_trainable=True, low_cpu_mem_usage=True
            ).eval()
        return models[name]

    return one


@pytest.mark.filterwarnings("ignore:Specified to not load vera_A")
@settings(max_examples=8, deadline=None)
@given(names=st.lists(NAMES, min_size=1, max_size=8), seed=st.integers(0, 99), block=st.sampled_from([None, 3]))
@example(names=[name for number, name in enumerate([*METHODS, BASE]) for _ in range(1 + number % 4)], seed=0, block=3)
def test_a_mixed_batch_gives_the_results_of_each_task_alone(
    exact: Tasks, alone: Callable[[str], Any], names: list[str], seed: int, block: int | None
) -> None:
    """In blocks, C3A and diff pruning compute in float32."""
    x, tolerance = ids(len(names), tokens=9, seed=seed), 1e-9 if block is None else 1e-5
    with torch.no_grad():
        with exact.batch(names, block=block):
            mixed = exact.model(input_ids=x).logits
        for name in set(names):
            rows = [i for i, other in enumerate(names) if other == name]
            expected = alone(name)(input_ids=x[rows]).logits
            torch.testing.assert_close(mixed[rows], expected, rtol=tolerance, atol=tolerance)


@pytest.mark.filterwarnings("ignore:Specified to not load vera_A")
def test_gradients_of_a_mixed_batch_are_those_of_each_task_alone(
    llama: Path, folders: Path, alone: Callable[[str], Any]
) -> None:
    tasks = Tasks(load_model(llama, dtype=torch.float64))
    tasks.register_all(folders)
    names = [*METHODS, *METHODS, "lora"]
    for name in METHODS:
        tasks.load(name, trainable=True)
    x = ids(len(names))
    with tasks.batch(names):
        out = tasks.model(input_ids=x).logits
    (out**2).sum().backward()
    for name in METHODS:
        model = alone(name)
        model.zero_grad()
        rows = [i for i, other in enumerate(names) if other == name]
        (model(input_ids=x[rows]).logits ** 2).sum().backward()
        expected = [p.grad for p in model.parameters() if p.requires_grad]
        found = [p.grad for p in tasks.parameters(name)]
        assert len(found) == len(expected) > 0
        for one, other in zip(found, expected, strict=True):
            tolerance = 1e-5 if name == "diff-pruning" else 1e-8  # its sparse product keeps float32
            torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)
    tasks.close()


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated:FutureWarning")
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_computes_layers_again_for_their_own_batch(llama: Path, folders: Path, reentrant: bool) -> None:
    """`backward` may run in the batch of other tasks."""
    tasks = Tasks(load_model(llama, dtype=torch.float64))
    tasks.register_all(folders)
    tasks.model.train()

    def gradients() -> list[Tensor | None]:
        for name in ("lora", "oft"):
            tasks.load(name, trainable=True)
        parameters = [*tasks.parameters("lora"), *tasks.parameters("oft")]
        with tasks.batch(["lora", "oft", "lora"]):
            loss = (tasks.model(input_ids=ids(3)).logits ** 2).sum()
        with tasks.batch(["oft", "lora", "oft"]):
            loss.backward()
        found = [parameter.grad for parameter in parameters]
        for parameter in parameters:
            parameter.grad = None
        return found

    plain = gradients()
    tasks.model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    tasks.model.enable_input_require_grads()
    for one, other in zip(gradients(), plain, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)
    tasks.close()


@settings(max_examples=6, deadline=None)
@given(names=st.lists(NAMES, min_size=2, max_size=8), seed=st.integers(0, 99), data=st.data())
def test_no_row_depends_on_another_tasks_rows_or_adapter(
    split: Tasks, names: list[str], seed: int, data: st.DataObject
) -> None:
    """Bit for bit: whatever another task holds, and whatever its rows say."""
    other = data.draw(st.sampled_from(sorted({*names})))
    mine = [i for i, name in enumerate(names) if name != other]
    theirs = [i for i, name in enumerate(names) if name == other]
    x = ids(len(names), tokens=9, seed=seed)
    changed = x.clone()
    changed[theirs] = ids(len(theirs), tokens=9, seed=seed + 1)
    with torch.no_grad(), split.batch(names):
        before = split.model(input_ids=x).logits
        for parameter in _parameters(split, other):
            parameter.mul_(1.5).add_(0.01)
        after = split.model(input_ids=changed).logits
        for parameter in _parameters(split, other):
            parameter.sub_(0.01).div_(1.5)
    assert torch.equal(before[mine], after[mine])


@settings(max_examples=25, deadline=None)
@given(company=st.lists(NAMES, min_size=1, max_size=40), name=NAMES, place=st.integers(0, 40), seed=st.integers(0, 99))
def test_in_blocks_a_row_has_the_bits_it_has_alone(
    split: Tasks, company: list[str], name: str, place: int, seed: int
) -> None:
    """The other tasks of the batch and the place of the row change no bit, at every linear of a layer."""
    generator = torch.Generator().manual_seed(seed)
    names = [*company[:place], name, *company[place:]]
    row = min(place, len(company))
    layer = split.model.model.layers[0]
    for linears in (
        [layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj],
        [layer.self_attn.o_proj],
        [layer.mlp.gate_proj, layer.mlp.up_proj],
        [layer.mlp.down_proj],
    ):
        x = torch.randn(len(names), 1, linears[0].in_features, generator=generator)
        own = x[row : row + 1].clone()
        with torch.inference_mode():
            with split.batch(names, block=4):
                mixed = [linear(x)[row] for linear in linears]
            with split.batch([name], block=4):
                alone = [linear(own)[0] for linear in linears]
        for one, other in zip(mixed, alone, strict=True):
            assert torch.equal(one, other)


@settings(max_examples=20, deadline=None)
@given(
    inputs=st.sampled_from([24, 256, 576, 1000]),
    outputs=st.sampled_from([8, 100, 576]),
    rank=st.sampled_from([1, 4, 5, 16, 64]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    tasks=st.integers(1, 9),
    rows=st.integers(1, 9),
    place=st.integers(0, 80),
    threads=st.integers(1, 4),
    compiled=st.sampled_from([TORCH, BUILDS[-1]]),
)
@example(  # MKL's order depends on the place
    inputs=24, outputs=8, rank=5, dtype=torch.float32, tasks=1, rows=8, place=1, threads=1, compiled=TORCH
)
def test_a_row_of_lora_has_the_same_bits_whatever_the_number_of_tasks_and_rows(
    inputs: int,
    outputs: int,
    rank: int,
    dtype: torch.dtype,
    tasks: int,
    rows: int,
    place: int,
    threads: int,
    compiled: str,
) -> None:
    torch.set_num_threads(threads)
    torch.manual_seed(inputs)
    layers: list[Any] = [
        peft.tuners.lora.Linear(nn.Linear(inputs, outputs), NAME, r=rank, config=LoraConfig(r=rank)).to(dtype)
        for _ in range(3)
    ]
    for layer in layers:
        nn.init.normal_(layer.lora_B[NAME].weight)
    key = operator_key(layers[0])
    x, y = torch.randn(rows * tasks, inputs, dtype=dtype), torch.randn(rows * tasks, outputs, dtype=dtype)
    place %= len(x)
    of_tasks = [layers[number % 3] for number in range(tasks)]
    with torch.inference_mode(), using(compiled):
        mixed = key[0](of_tasks, block=8).after(x, y, no_base)[place]
        own_x, own_y = x[place : place + 1].clone(), y[place : place + 1].clone()
        alone = key[0](of_tasks[place // rows :][:1], block=8).after(own_x, own_y, no_base)[0]
    assert torch.equal(mixed, alone)


@pytest.mark.skipif(BUILDS == (TORCH,), reason="needs the compiled library")
def test_rows_of_lora_fill_no_blocks_and_have_the_same_bits_on_every_processor(split: Tasks) -> None:
    """With AVX2, MKL's sums depend on a row's place in a block: such rows were filled up and multiplied one by one."""
    projection = split.model.model.layers[0].self_attn.q_proj
    names, x = ["lora", BASE, "lora-r8", "lora"], torch.randn(4, 1, projection.in_features)
    results, blas = [], mock.patch.object(row_blocks, "_place_matters", side_effect=AssertionError)
    for compiled in BUILDS[1:]:
        own = mock.patch.object(row_blocks, "linear", wraps=linear)
        with using(compiled), torch.no_grad(), blas, own as own_linear, split.batch(names, block=8):
            results.append(projection(x))
        assert sorted(len(call.args[0]) for call in own_linear.call_args_list) == [1, 1, 2, 2]
    assert all(torch.equal(result, results[0]) for result in results)


def no_base(*_: Any) -> Tensor:
    raise AssertionError("LoRA needs no second product")


def _parameters(tasks: Tasks, name: str) -> list[Tensor]:
    layers = {} if name == BASE else tasks._loaded[name].layers
    return [p for layer in layers.values() for p in layer.parameters() if p.numel() and not hasattr(p, "_whole")]


@pytest.mark.parametrize("names", [["lora", "vera", "ia3", "loha", "road", BASE], ["oft", "lora", "oft-b", "ia3"]])
def test_one_request_serves_all_rows_of_a_layer_group(split: Tasks, names: list[str]) -> None:
    """If tasks change the inputs of q and v, the changed rows are added to the request."""
    backend = backend_of(split.model)
    with mock.patch.object(backend, "multiply", wraps=backend.multiply) as multiply, torch.no_grad():
        with split.batch(names):
            split.model(input_ids=ids(len(names)))
        assert len(multiply.mock_calls) == len(backend.facts)


def test_batches_that_end_in_another_order_are_an_error_and_leave_no_task_active(split: Tasks) -> None:
    """Two generators that yield inside `batch`."""

    def answers(name: str) -> Iterator[Tensor]:
        with split.batch([name]):
            yield split.model(input_ids=ids(1)).logits

    with torch.no_grad():
        base = split.model(input_ids=ids(1)).logits
    first, second = answers("lora"), answers("oft")
    next(first)
    next(second)
    with pytest.raises(TaskError, match="still open"):
        list(first)
    list(second)
    with torch.no_grad():
        assert torch.equal(split.model(input_ids=ids(1)).logits, base)


def test_a_task_trains_in_a_mixed_batch(llama: Path, folders: Path, tmp_path: Path) -> None:
    """A new task learns beside a task that is served; its folder works in the plain model with PEFT."""
    tasks = Tasks(load_model(llama, remote=RemoteConfig(masking="simulate"), dtype=torch.float32))
    tasks.register("served", folders / "ia3")
    tasks.register("new", LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
    optimizer = torch.optim.AdamW(tasks.parameters("new"), lr=1e-2)
    x, losses = ids(4), []
    for _ in range(5):
        with tasks.batch(["new", "served", "new", "served"]):
            logits = tasks.model(input_ids=x).logits[[0, 2]]
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), x[[0, 2], 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.1
    with pytest.raises(TaskError, match="saved"):
        tasks.unload("new")
    tasks.save("new", tmp_path / "new")
    tasks.unload("new")
    with torch.no_grad(), tasks.batch(["new"] * 4):
        served = tasks.model(input_ids=x).logits
    at_home = PeftModel.from_pretrained(load_model(llama, dtype=torch.float32), str(tmp_path / "new")).eval()
    with torch.no_grad():
        torch.testing.assert_close(served, at_home(input_ids=x).logits, rtol=0.05, atol=0.05)
    tasks.close()


@pytest.mark.filterwarnings("ignore:Unsupported layer type")  # PEFT, of a norm
def test_tasks_can_adapt_norms_and_heads(tmp_path: Path, save_llama: Callable[..., Path], write_task: Any) -> None:
    """Methods that replace a module instead of adding to it: norms, and heads (`modules_to_save`)."""
    path = tmp_path / "classifier"
    build("LlamaForSequenceClassification", pad_token_id=0, num_labels=3).save_pretrained(path)
    model = LlamaForSequenceClassification.from_pretrained(
        path, quantization_config=RemoteConfig(masking="simulate")
    ).eval()
    tasks = Tasks(model)
    tasks.register("norms", LNTuningConfig(task_type="SEQ_CLS", target_modules=["input_layernorm"]))
    tasks.register("head", LoraConfig(task_type="SEQ_CLS", target_modules=["q_proj"]))
    x = ids(3)
    with torch.no_grad():
        base = model(input_ids=x).logits
        for parameter in tasks.parameters("norms"):
            parameter.mul_(1.5)
        for parameter in tasks.parameters("head"):
            parameter.add_(0.5)
        with tasks.batch(["norms", BASE, "head"]):
            mixed = model(input_ids=x).logits
        for name, row in (("norms", 0), ("head", 2)):
            with tasks.batch([name]):
                torch.testing.assert_close(mixed[row], model(input_ids=x).logits[row], rtol=1e-3, atol=1e-3)
            assert not torch.allclose(mixed[row], base[row], rtol=1e-2)
        torch.testing.assert_close(mixed[1], base[1], rtol=1e-3, atol=1e-3)
        assert torch.equal(model(input_ids=x).logits, base)
    tasks.close()


@pytest.mark.parametrize("names", [["lora", "ia3"], ["ia3", "ia3-b"]])  # IA3 adapts k and v, and q is called first
def test_inputs_with_an_ambiguous_row_dimension_are_refused(split: Tasks, names: list[str]) -> None:
    with pytest.raises(TaskError, match="per row"), split.batch(names):
        split.model(input_ids=ids(3))
    split._rows_first.clear()
    with pytest.raises(UnsupportedModelError, match="dimension"), split.batch(names):
        split.model(input_ids=ids(2, tokens=2))


def test_a_method_without_layers_is_refused(split: Tasks) -> None:
    split.register("prompt", PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2))
    with pytest.raises(UnsupportedMethodError, match="input"):
        split.load("prompt")
    split.register("biases", LoraConfig(target_modules=["q_proj"], bias="all"))
    with pytest.raises(UnsupportedMethodError, match="bias"):
        split.load("biases")


def test_methods_that_read_base_weights_share_the_product_too(llama: Path, tmp_path: Path) -> None:
    """Each method's rows are near those of PEFT's own model of that task, and far from the base model's."""
    remote = RemoteConfig(masking="simulate")
    tasks = Tasks(load_model(llama, remote=remote, dtype=torch.float32))
    expected = {}
    for name, config in table(__file__, "from_weights").items():
        base = load_model(llama, remote=remote, dtype=torch.float32)
        adapted = write_adapter(base, tmp_path / name, peft_config(**config))
        with torch.no_grad():
            expected[name] = adapted.eval()(input_ids=ids(1, tokens=9)).logits[0]
        tasks.register(name, tmp_path / name)
    with torch.no_grad():
        base = tasks.model(input_ids=ids(1, tokens=9)).logits[0]
        with tasks.batch([*expected, BASE]):
            mixed = tasks.model(input_ids=ids(1, tokens=9).expand(len(expected) + 1, -1)).logits
    for row, (name, logits) in enumerate(expected.items()):
        error, change = (mixed[row] - logits).norm(), (logits - base).norm()
        assert error < 0.05 * change, name
    torch.testing.assert_close(mixed[-1], base, rtol=1e-2, atol=1e-2)
    names, projection = [*expected, BASE] * 3, tasks.model.model.layers[0].self_attn.v_proj
    x = torch.randn(len(names), 1, projection.in_features)
    with torch.inference_mode():
        with tasks.batch(names, block=4):
            rows = projection(x)
        for row, name in enumerate(names):
            with tasks.batch([name], block=4):
                assert torch.equal(rows[row], projection(x[row : row + 1].clone())[0]), name
    tasks.close()
