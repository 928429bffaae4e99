"""Offloaded linears: one product per group of siblings, no stored input, no readable weight."""

import copy
import pickle
import re
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor, nn

from symbiosis_priv.arithmetic.ring import BACKWARD, FORWARD, RANGE, Direction, quantise_rows
from symbiosis_priv.checkpoints.manifest import GroupFacts
from symbiosis_priv.checkpoints.weights import WeightStore
from symbiosis_priv.errors import UnsupportedMethodError
from symbiosis_priv.harness import strategies as testing
from tenant.masking.backend import Backend, Product, RingBackend, Simulation
from tenant.model.hf import backend_of
from tenant.model.loading import load_adapter, load_model
from tenant.model.offloaded import OffloadedWeight, set_dtype_and_device
from tenant.model.remote_linear import LayerGroup, RemoteLinear
from tests.adapters import peft_config
from tests.cases import cases
from tests.splitting import split_model, watched

QKV, OUT = 0, 1  # layer groups of the tiny Llama's first block
IDS = torch.arange(3, 15).view(2, 6)
Siblings = list[RemoteLinear]


class Counting(Backend):
    """The simulation, with a list of its requests."""

    def __init__(self, store: WeightStore) -> None:
        entries = store.manifest().groups
        self.facts = [GroupFacts.of(entry, store.group(i)) for i, entry in enumerate(entries)]
        self.calls: list[tuple[int, Direction, Tensor]] = []
        self._inner = RingBackend(self.facts, Simulation(store))

    def compute(self, product: Product) -> None:
        rows = torch.cat([part.detach() for part in product.inputs], dim=1)
        self.calls.append((product.group, product.direction, rows))
        self._inner.compute(product)

    def close(self) -> None:
        self._inner.close()

    @property
    def directions(self) -> list[Direction]:
        return [direction for _, direction, _ in self.calls]


@pytest.fixture
def backend(store: WeightStore) -> Counting:
    return Counting(store)


@pytest.fixture
def qkv(backend: Counting) -> Siblings:
    """Three siblings of one group."""
    return siblings(backend)


def siblings(backend: Counting, index: int = QKV) -> Siblings:
    group = LayerGroup(backend, index)
    entry = backend.facts[index].entry
    modules = [RemoteLinear(entry.inputs, outputs, group=group, member=i) for i, outputs in enumerate(entry.outputs)]
    for module in modules:
        set_dtype_and_device(module, dtype=torch.float32, device=torch.device("cpu"))
    return modules


def activations(*shape: int, dtype: torch.dtype = torch.float32) -> Any:
    return torch.randn(*shape, 64, generator=torch.Generator().manual_seed(5)).to(dtype)


# Siblings


@pytest.mark.parametrize("guard", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_siblings_are_one_product(qkv: Siblings, backend: Counting, guard: Callable[[], Any]) -> None:
    with guard():
        x = activations(2, 3)
        y = [module(x) for module in qkv]
    assert [part.shape for part in y] == [(2, 3, 64), (2, 3, 32), (2, 3, 32)]
    assert backend.directions == [FORWARD]
    reference = backend.linear(QKV, FORWARD, x.reshape(-1, 64)).float()
    assert torch.equal(torch.cat(y, dim=-1).reshape(6, -1), reference)


def test_a_sibling_without_gradient_counts_as_zero(qkv: Siblings, backend: Counting) -> None:
    x = activations(4).requires_grad_()
    _, key, _ = (module(x) for module in qkv)
    key.sum().backward()
    ((_, _, g),) = [call for call in backend.calls if call[1] == BACKWARD]
    assert torch.equal(g, torch.cat([torch.zeros(4, 64), torch.ones(4, 32), torch.zeros(4, 32)], dim=1))


def test_siblings_may_be_called_in_any_order_and_again(qkv: Siblings, backend: Counting) -> None:
    x = activations(2)
    with torch.no_grad():
        first = [qkv[i](x) for i in (2, 0, 1)]
        assert len(backend.calls) == 1
        assert torch.equal(qkv[2](x), first[0])  # the others are collected already: another product
    assert len(backend.calls) == 2


@pytest.mark.parametrize("guard", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("change", [lambda x: x.clone(), lambda x: x.mul_(2)], ids=["equal", "changed in place"])
def test_another_tensor_or_other_values_are_another_input(
    qkv: Siblings, backend: Counting, guard: Callable[[], Any], change: Callable[[Tensor], Tensor]
) -> None:
    with guard():
        qkv[0](x := activations(2))
        key = qkv[1](x := change(x))
        assert len(backend.calls) == 2
        assert torch.equal(key, siblings(backend)[1](x))


@pytest.mark.parametrize(
    ("first", "then"),
    [
        (torch.no_grad, torch.enable_grad),
        (torch.enable_grad, torch.no_grad),
        (torch.inference_mode, torch.enable_grad),
        (torch.inference_mode, torch.no_grad),
    ],
)
def test_gradient_modes_are_kept_apart(
    qkv: Siblings, backend: Counting, first: Callable[[], Any], then: Callable[[], Any]
) -> None:
    x = activations(2).requires_grad_()
    with first():
        qkv[0](x)
    with then():
        key = qkv[1](x)
    assert len(backend.calls) == 2
    assert key.requires_grad == (then is torch.enable_grad)
    assert not key.is_inference()


def test_autocast_decides_the_output_dtype(qkv: Siblings, backend: Counting) -> None:
    x = activations(2).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        y = qkv[0](x)
    assert y.dtype == torch.bfloat16
    assert qkv[1](x).dtype == torch.float32
    assert len(backend.calls) == 2
    y.sum().backward()
    assert x.grad.dtype == torch.float32


def test_outputs_may_be_written_to(qkv: Siblings) -> None:
    x = activations(2).requires_grad_()
    query, key = qkv[0](x), qkv[1](x)
    before = key.detach().clone()
    query.mul_(2).add_(1)
    assert torch.equal(key, before)
    query.sum().backward()


def test_pending_outputs_end_with_their_input(qkv: Siblings, backend: Counting) -> None:
    """A new tensor at the address of a freed one is another input."""
    with torch.no_grad():
        for i in range(20):
            qkv[0](activations(2) * i)
            qkv[1](activations(2) * -i)
    assert len(backend.calls) == 40


def test_threads_share_a_group_without_losing_siblings_outputs(qkv: Siblings, backend: Counting) -> None:
    """Two threads reach each sibling at the same time: one product per thread, and each gets its own outputs."""
    inputs = [activations(2), -activations(2)]
    at_once = threading.Barrier(len(inputs), timeout=10)

    @torch.no_grad()
    def run(x: Tensor) -> list[Tensor]:
        outputs = []
        for module in qkv:
            at_once.wait()
            outputs.append(module(x))
        return outputs

    with ThreadPoolExecutor(len(inputs)) as threads:
        found = list(threads.map(run, inputs))
    assert len(backend.calls) == len(inputs)
    for x, outputs in zip(inputs, found, strict=True):
        expected = backend.linear(QKV, FORWARD, x).float()
        assert torch.equal(torch.cat(outputs, dim=-1), expected)


# Arithmetic


def dequantised(store: WeightStore, index: int) -> Tensor:
    group = store.group(index)
    return group.weight.to(torch.float64) * group.channel_scale[:, None]


@pytest.mark.parametrize("index", [QKV, OUT])
@given(data=st.data())
def test_forward_and_backward_are_products_of_the_dequantised_weights(
    store: WeightStore, index: int, data: st.DataObject
) -> None:
    """The only error is the rounding of a row to its scale: half a step per entry, times the weights.

    A subnormal scale is itself rounded, by at most 2^-1075: times any product.
    """
    backend = Counting(store)
    weight = dequantised(store, index)
    x: Any = data.draw(
        testing.float_rows(width=weight.shape[1], dtypes=[torch.float64], largest=1e200)
    ).requires_grad_()
    parts = [module(x) for module in siblings(backend, index)]
    g = data.draw(testing.float_rows(width=weight.shape[0], count=len(x), dtypes=[torch.float64], largest=1e200))
    torch.cat(parts, dim=1).backward(g)
    folded = g * store.group(index).channel_scale
    unscaled = store.group(index).weight.to(torch.float64)
    for rows, matrix, raw, got in (
        (x.detach(), weight.t(), weight.t(), torch.cat(parts, dim=1).detach()),
        (folded, unscaled, unscaled, x.grad),
    ):
        bound = backend.facts[index].bounds[FORWARD if rows is not folded else BACKWARD]
        _, scale = quantise_rows(rows, bound)
        allowed = scale / 2 * raw.abs().sum(dim=0)
        size = rows.abs() @ matrix.abs()  # error of the float64 reference itself
        assert bool(((got - rows @ matrix).abs() <= allowed * (1 + 1e-9) + size * 1e-12 + RANGE * 5e-324).all())


@pytest.mark.parametrize("biased", [False, True])
def test_a_gradients_gradient_is_the_forward_product_of_one_request(
    biased: bool, store: WeightStore, gpt2_store: WeightStore
) -> None:
    """Of all siblings, without the bias, to any order. The order of terms is that of plain linears."""
    used = gpt2_store if biased else store
    backend = Counting(used)
    modules = siblings(backend)
    split, bias = list(modules), used.group(QKV).bias
    parts = dequantised(used, QKV).split([module.out_features for module in modules])
    biases = [None] * 3 if bias is None else bias.double().split([len(part) for part in parts])
    plain = [partial(nn.functional.linear, weight=w, bias=b) for w, b in zip(parts, biases[: len(parts)], strict=True)]
    assert (bias is not None) == biased

    def derivatives(linears: Sequence[Callable[[Tensor], Tensor]]) -> list[Tensor]:
        x = activations(5, dtype=torch.float64).requires_grad_()
        loss = torch.stack([linear(x).sin().sum() for linear in linears]).sum()
        found = []
        for _ in range(3):
            (grad,) = torch.autograd.grad(loss, x, create_graph=True)
            loss = grad.square().sum()
            found.append(grad.detach())
        return found

    for mine, expected in zip(derivatives(split), derivatives(plain), strict=True):
        assert (mine - expected).abs().max() <= 1e-4 * expected.abs().max()
    assert backend.directions[:4] == [FORWARD, BACKWARD, FORWARD, BACKWARD]


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_a_gradient_that_is_not_finite_stays_here(qkv: Siblings, backend: Counting, value: float) -> None:
    """Its row's product is nan, rows of zeros are sent in its place, and other rows have their own bits."""
    x = activations(4).requires_grad_()
    query, key, _ = (module(x) for module in qkv)
    grads = [torch.ones(4, 64), torch.full((4, 32), 2.0)]
    (expected,) = torch.autograd.grad([query, key], x, grads, retain_graph=True)
    sent = backend.calls[-1][2].clone()
    grads[1][2, 5] = value
    (found,) = torch.autograd.grad([query, key], x, grads)
    assert found[2].isnan().all()
    kept = torch.tensor([0, 1, 3])
    assert torch.equal(found[kept], expected[kept])
    assert backend.directions[1:] == [BACKWARD] * 3  # one that the simulation has refused
    assert torch.equal(backend.calls[-1][2], sent.index_fill(0, torch.tensor([2]), 0))


@pytest.mark.parametrize("shape", [(0,), (0, 5), (2, 0)])
def test_no_rows_make_no_request(qkv: Siblings, shape: tuple[int, ...]) -> None:
    x = activations(*shape).requires_grad_()
    y = qkv[0](x)
    assert y.shape == (*shape, 64)
    y.sum().backward()
    assert x.grad.shape == x.shape


# Memory


def test_nothing_is_saved_for_backward(qkv: Siblings) -> None:
    saved: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        x = activations(4).requires_grad_()
        y = [module(x) for module in qkv]
    assert saved == []
    torch.cat(y, dim=-1).sum().backward()


def test_copies_of_a_weight_have_no_values(qkv: Siblings) -> None:
    """Operations on a weight before a computation return no tensor that could be computed with."""
    weight = qkv[1].weight
    for twin in (
        weight.detach(),
        weight.clone(),
        weight.data,
        weight.to(torch.bfloat16).to("cpu").float(),
        copy.deepcopy(weight),
        weight.requires_grad_(False),
    ):
        assert isinstance(twin, OffloadedWeight)
        assert twin.shape == twin.size() == (32, 64)
        assert (twin.size(0), twin.dim(), twin.ndim, len(twin), twin.nbytes) == (32, 2, 2, 32, 0)
    assert qkv[0].to(torch.float64).weight.dtype == torch.float64
    assert repr(weight) == "OffloadedWeight((32, 64), dtype=torch.float32, device='cpu')"
    with pytest.raises(UnsupportedMethodError, match="cannot be pickled"):
        pickle.dumps(qkv)


@pytest.mark.parametrize(
    "read",
    [
        lambda w: w + 1,
        lambda w: w @ w,
        lambda w: w.sum(),
        lambda w: w.data + 1,
        lambda w: w.data.clamp_(-1, 1),
        lambda w: w.detach().float().sum(),
        lambda w: w.T,
        lambda w: torch.cat([torch.zeros(2, 64), w]),
        lambda w: setattr(w, "data", torch.zeros(64, 64)),
        lambda w: torch.linalg.norm(w),
        lambda w: torch.nn.functional.linear(torch.zeros(2, 64), w),
        lambda w: w.tolist(),
        lambda w: w.numpy(),
        lambda w: torch.empty_like(w),
    ],
)
def test_a_weight_cannot_be_read(qkv: Siblings, read: Callable[[Tensor], object]) -> None:
    with pytest.raises(UnsupportedMethodError, match="stays at the providers"):
        read(qkv[0].weight)


def test_a_weight_cannot_be_trained(qkv: Siblings) -> None:
    with pytest.raises(UnsupportedMethodError, match="weight of an offloaded layer cannot be trained"):
        nn.ModuleList(qkv).requires_grad_(True)


# PEFT


@cases(__file__, "inputs")
def test_inputs_that_an_adapter_changes_are_requests_of_their_own(
    config: dict[str, Any], of_qkv: int, llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """OFT rotates the input of q and of v, so q/k/v take three requests. IA3 changes that of `down_proj`, which has no
    siblings."""
    base: Any = split_model(llama)
    facts, calls = backend_of(base).facts, watched(base, monkeypatch)
    peft.get_peft_model(base, peft_config(**config)).eval()(input_ids=torch.arange(5)[None])
    asked = Counter(facts[product.group].entry.members[0].rpartition(".")[2] for (product,) in calls)
    blocks = base.config.num_hidden_layers
    others = {"o_proj": blocks, "gate_proj": blocks, "down_proj": blocks, "lm_head": 1}
    assert asked == {"q_proj": of_qkv * blocks} | others


@cases(__file__, "refused")
def test_methods_that_read_the_base_weight_are_refused_by_name(
    name: str, config: dict[str, Any], advice: str | None, llama: Path, tmp_path: Path
) -> None:
    """Both a new adapter, before its first step, and one from a folder. Layers that stay with the tenant take them."""
    made = peft_config(**config)
    reason = rf"^{re.escape(name)} needs the base weight, .*providers\. {advice or 'On an offloaded nn.Linear, PEFT'}"
    with pytest.raises(UnsupportedMethodError, match=reason):
        peft.get_peft_model(split_model(llama), copy.deepcopy(made))
    whole: Any = peft.get_peft_model(load_model(llama, dtype=torch.float32), copy.deepcopy(made))
    whole.save_pretrained(str(tmp_path))
    with pytest.raises(UnsupportedMethodError, match=reason):
        load_adapter(split_model(llama), tmp_path)


def test_corda_is_refused_before_it_is_prepared(llama: Path) -> None:
    config = peft_config(
        "LORA", init_lora_weights="corda", corda_config={"corda_method": "kpm"}, target_modules=["q_proj"]
    )
    with pytest.raises(UnsupportedMethodError, match="init_lora_weights='corda' needs the base weight"):
        peft.get_peft_model(split_model(llama), config)


@pytest.mark.parametrize("verb", ["merge_and_unload", "merge_adapter", "unmerge"])
def test_merging_is_refused_by_name(llama: Path, verb: str) -> None:
    lora = peft.LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM")
    model: Any = peft.get_peft_model(split_model(llama), lora)
    if verb == "unmerge":
        model = model.base_model.model.model.layers[0].self_attn.q_proj
        model.merged_adapters.append("default")  # as if it had been merged
    with pytest.raises(UnsupportedMethodError, match=r"^merging an adapter into W needs the base weight"):
        getattr(model, verb)()


def test_training_an_offloaded_layer_itself_is_refused(llama: Path) -> None:
    """PEFT would train a copy of the layer, and the copy would have no values."""
    config = peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"], task_type="CAUSAL_LM")
    with pytest.raises(UnsupportedMethodError, match=r"target_modules instead of modules_to_save"):
        peft.get_peft_model(split_model(llama), config)
    config = peft.LoraConfig(
        target_modules=["q_proj", "lm_head"], modules_to_save=["embed_tokens"], task_type="CAUSAL_LM"
    )
    assert peft.get_peft_model(split_model(llama), config)


@pytest.fixture
def biased(gpt2: Path) -> Any:
    """A split GPT-2 in simulation."""
    return split_model(gpt2)


def test_a_bias_is_with_the_tenant_and_is_saved_once_trained(biased: Any) -> None:
    """The bias is listed, moved and copied with the model. The product includes it: untrained, it changes no bit."""
    with torch.no_grad():
        expected = biased(input_ids=IDS).logits
    name = "transformer.h.0.attn.c_attn"
    bias: Any = biased.get_submodule(name).bias
    assert isinstance(bias, nn.Parameter)
    assert not bias.requires_grad
    twin = copy.deepcopy(biased).to(torch.float64)
    assert twin.get_submodule(name).bias.dtype == torch.float64
    for model in (biased, twin):
        assert not any(key.endswith("c_attn.bias") for key in model.state_dict())
        assert not model.load_state_dict(model.state_dict()).missing_keys
    bias.requires_grad_(True)
    logits = biased(input_ids=IDS).logits
    assert torch.equal(logits, expected)
    logits.sum().backward()
    assert bias.grad is not None
    assert bool(bias.grad.any())
    bias.requires_grad_(False)
    with torch.no_grad():
        bias.add_(1)
        changed = biased(input_ids=IDS).logits
    assert not torch.equal(changed, expected)
    stored = biased.state_dict()
    assert torch.equal(stored[f"{name}.bias"], bias)
    with pytest.raises(RuntimeError, match=r"c_attn\.bias is \[3\]"):
        biased.load_state_dict(stored | {f"{name}.bias": torch.zeros(3)})
    with pytest.raises(RuntimeError, match="Unexpected key"):
        biased.load_state_dict(stored | {f"{name}.weight": torch.zeros(64, 192)})
