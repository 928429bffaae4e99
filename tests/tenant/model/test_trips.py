"""Two round trips for a block: the outputs of four within the rounding of weights, with every adapter, and fewer waits.

A composed product that does not fit is never used: whatever changes a sum, a norm or an output gives the results of
four round trips.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from symbiosis_priv.checkpoints.discovery.linears import name_in
from symbiosis_priv.errors import ConfigError, UnsupportedModelError
from tenant import backend_of
from tenant.masking.backend import Backend, Product
from tenant.model.remote_linear import RemoteLayer
from tenant.model.trips import Trip, _Sent
from tenant.options import MOST_ROWS
from tenant.tasks import Tasks
from tenant.tasks.batch import BASE
from tests import splitting
from tests.adapters import peft_config
from tests.cases import cases, table
from tests.splitting import split_model, watched

IDS = torch.arange(3, 12).view(1, 9)
ORDINARY, COMPOSED = 3 * 4 + 1, 5  # layer groups of three blocks and the head; sums that a norm and linears follow
FAMILIES, OTHERS = (table(__file__, name) for name in ("families", "others"))


@pytest.fixture(scope="module", params=FAMILIES)
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three blocks with norms and biases that are not the identity."""
    folder = tmp_path_factory.mktemp(request.param)
    sizes = table(__file__, "sizes")
    torch.manual_seed(1)
    kind: Any = CONFIG_MAPPING[request.param]
    model: Any = AutoModelForCausalLM.from_config(kind(**sizes | (FAMILIES | OTHERS).get(request.param, {})))
    with torch.no_grad():
        for parameter in model.parameters():
            special = parameter.dim() == 1
            parameter.normal_(mean=1.0 if special else 0.0, std=0.3 if special else 0.1)
    model.save_pretrained(folder)
    return folder


@pytest.fixture
def loaded(path: Path) -> Callable[..., Any]:
    def load(round_trips: Any = 2, **options: Any) -> Any:
        return split_model(path, round_trips=round_trips, **options)

    return load


def logits(model: Any, ids: Tensor = IDS) -> Tensor:
    return splitting.logits(model, ids)


def waits(calls: list[list[Product]]) -> tuple[int, int]:
    """How often a pass has waited, and for how many products; they are forgotten."""
    found = len(calls), sum(map(len, calls))
    calls.clear()
    return found


def assert_close(found: Tensor, expected: Tensor, *, to: float = 0.02) -> None:
    """Weights of 10 bits change these logits by less than one per cent of their size."""
    assert (found.float() - expected.float()).abs().max() <= to * expected.abs().max()


@pytest.mark.parametrize("path", FAMILIES | OTHERS, indirect=True)
def test_a_token_waits_half_as_often(loaded: Callable[..., Any], path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    two, four = loaded(), loaded(4)
    ordinary = len(backend_of(four).facts)  # a tied head is not among them
    plain = AutoModelForCausalLM.from_pretrained(path).eval()
    assert_close(logits(two), logits(plain))
    assert_close(logits(two), logits(four))
    for model, expected in ((two, ordinary - COMPOSED), (four, ordinary)):
        calls = watched(model, monkeypatch)
        logits(model)
        assert waits(calls) == (expected, ordinary)
        model.generate(IDS, max_new_tokens=4, do_sample=False)
        assert waits(calls) == (4 * expected, 4 * ordinary)


def test_gradients_and_many_rows_take_four_with_their_bits(loaded: Callable[..., Any]) -> None:
    two, four = loaded(), loaded(4)
    ids = torch.arange(3, 3 + MOST_ROWS + 1).view(1, -1)
    assert torch.equal(logits(two, ids), logits(four, ids))
    assert not torch.equal(logits(two, ids[:, 1:]), logits(four, ids[:, 1:]))
    found = [model(input_ids=IDS).logits for model in (two, four)]
    assert torch.equal(*found)
    losses = [peft.get_peft_model(model, lora())(input_ids=IDS, labels=IDS).loss for model in (two, four)]
    assert torch.equal(*losses)


def lora(**changes: Any) -> peft.LoraConfig:
    torch.manual_seed(5)
    given: dict[str, Any] = {"target_modules": "all-linear", "r": 4, "init_lora_weights": False}
    return peft.LoraConfig(task_type="CAUSAL_LM", **given | changes)


@cases(__file__, "adapters")
@pytest.mark.filterwarnings("ignore:Unsupported layer type:UserWarning")
def test_an_adapter_has_the_outputs_of_four_round_trips(
    config: dict[str, Any], saved: int, loaded: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    models = []
    for round_trips in (2, 4):
        model = peft.get_peft_model(loaded(round_trips), peft_config(**config, task_type="CAUSAL_LM")).eval()
        generator = torch.Generator().manual_seed(6)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    strength = 0.2 if parameter.dim() > 1 else 1.0
                    parameter.copy_(strength * torch.randn(parameter.shape, generator=generator))
        models.append(model)
    two, four = models
    wanted = logits(four)
    with four.disable_adapter():
        assert (logits(four) - wanted).abs().max() > 0.1 * wanted.abs().max(), "the adapter changes little"
    assert_close(logits(two), wanted)
    calls = watched(two.get_base_model(), monkeypatch)
    assert_close(logits(two), wanted)
    assert len(calls) == len(backend_of(four).facts) - saved


def test_tasks_of_one_batch(loaded: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, targets in (("a", ["o_proj", "down_proj", "q_proj"]), ("b", ["down_proj"])):
        peft.get_peft_model(loaded(4), lora(target_modules=targets)).save_pretrained(str(tmp_path / name))
    found = []
    for round_trips in (2, 4):
        model = loaded(round_trips)
        tasks = Tasks(model)
        for name in ("a", "b"):
            tasks.register(name, tmp_path / name)
        with tasks.batch(["a", "b", BASE]):
            calls = watched(model, monkeypatch)
            found.append(logits(model, torch.arange(3, 15).view(3, 4)))
        assert waits(calls) == (ORDINARY - COMPOSED * (round_trips == 2), ORDINARY)
        tasks.close()
    assert_close(found[0], found[1])


class _Changed:
    """Multiplies one number of a module's output."""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        first = output[0] if isinstance(output, tuple) else output
        changed = first.clone()
        changed[..., 7] *= self.factor
        return (changed, *output[1:]) if isinstance(output, tuple) else changed


@pytest.mark.parametrize("path", ["llama"], indirect=True)
def test_a_change_anywhere_is_noticed(loaded: Callable[..., Any]) -> None:
    two, four = loaded(), loaded(4)

    @settings(max_examples=25)
    @given(
        name=st.sampled_from(["self_attn.o_proj", "post_attention_layernorm", "input_layernorm", "mlp", "self_attn"]),
        block=st.integers(0, 2),
        factor=st.sampled_from([0.0, 0.5, 0.99, 1.01, 3.0, -40.0]),
    )
    def check(name: str, block: int, factor: float) -> None:
        outputs = []
        for model in (two, four):
            handle = model.get_submodule(f"model.layers.{block}.{name}").register_forward_hook(_Changed(factor))
            try:
                outputs.append(logits(model))
            finally:
                handle.remove()
        assert_close(*outputs)

    check()


@pytest.mark.parametrize("path", ["llama", "nemotron"], indirect=True)
def test_biases_and_norms_are_copied_to_a_device_once(loaded: Callable[..., Any]) -> None:
    layers = (module for module in loaded().modules() if isinstance(module, RemoteLayer))
    trip = next(layer.group.trip for layer in layers if isinstance(layer.group.trip, Trip))
    copies = trip._on(torch.device("meta"))
    assert {copy.device.type for copy in copies.values()} == {"meta"}
    assert trip._on(torch.device("meta")) is copies


KINDS = st.sampled_from(["zeros", "equal", "nearly equal", "one", "normal", "outlier"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("path", FAMILIES | OTHERS, indirect=True)
def test_no_row_of_a_norm_changes_the_number_of_round_trips(
    loaded: Callable[..., Any], path: Path, dtype: torch.dtype
) -> None:
    model = loaded(dtype=dtype)
    layers = [module for module in model.modules() if isinstance(module, RemoteLayer)]
    [trip, *_] = [layer.group.trip for layer in layers if isinstance(layer.group.trip, Trip)]
    name = name_in(model, trip.after, dict(model.named_modules()))
    assert name is not None
    norm = model.get_submodule(name)
    low, high = (-8, 3) if dtype == torch.float16 else (-44, 35)  # times the gain, below the largest float32

    @given(
        rows=st.lists(st.tuples(KINDS, st.integers(low, high)), min_size=1, max_size=4), seed=st.integers(0, 1 << 32)
    )
    def check(rows: list[tuple[str, int]], seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        made = []
        for kind, exponent in rows:
            row = torch.randn(64, generator=generator, dtype=torch.float64)
            match kind:
                case "zeros":
                    row.zero_()
                case "equal":
                    row[:] = row[0]
                case "nearly equal":
                    row = row[0] + row * 10.0 ** -(seed % 10)
                case "one":
                    row[1:] = 0
                case "outlier":
                    row[5] *= 100
            made.append(row * 10.0**exponent)
        total = torch.stack(made).to(dtype)
        with torch.no_grad():
            normed = norm(total)
        if not normed.isfinite().all():  # an error, in two round trips and in four
            return
        sent = _Sent(trip, total, total.abs().float(), torch.zeros(len(rows), sum(trip._widths)))
        assert trip.finish(sent, total, norm, normed)

    check()


@pytest.mark.parametrize("path", ["gemma", "olmo"], indirect=True)  # without biases: zeros stay zeros
def test_a_token_whose_embedding_is_zero_shows_nothing(
    loaded: Callable[..., Any], path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    two, four = loaded(), loaded(4)
    for model in (two, four):
        with torch.no_grad():
            model.get_input_embeddings().weight[0] = 0
    calls, expected = watched(two, monkeypatch), len(backend_of(four).facts)
    for ids in ([[0]], [[0, 0, 5]], [[7, 0]], [[7, 8]]):
        found = logits(two, torch.tensor(ids))
        assert waits(calls) == (expected - COMPOSED, expected)
        assert_close(found, logits(four, torch.tensor(ids)))


def test_a_failed_round_trip_leaves_nothing_behind(loaded: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    model = loaded()
    wanted = logits(model)

    def fails(self: Backend, products: Sequence[Product]) -> None:
        raise RuntimeError("lost")

    with monkeypatch.context() as patch:
        patch.setattr(type(backend_of(model)), "multiply_all", fails)
        with pytest.raises(RuntimeError, match="lost"):
            logits(model)
    assert torch.equal(logits(model), wanted)


@pytest.mark.parametrize("path", ["olmo2"], indirect=True)  # a norm before the sum
def test_what_cannot_be_is_refused(loaded: Callable[..., Any]) -> None:
    with pytest.raises(ConfigError, match="round_trips = 3: choose 2 or 4"):
        loaded(3)
    with pytest.raises(UnsupportedModelError, match="round_trips = 2: no block of Olmo2ForCausalLM"):
        loaded()
