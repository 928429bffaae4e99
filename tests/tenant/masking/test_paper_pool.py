"""The paper's own masking: correct within a bound that is derived here, opt-in, with a warning."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st
from torch import Tensor

from symbiosis_priv.arithmetic.ring import FORWARD, Direction
from symbiosis_priv.checkpoints.layers import LayerRange
from symbiosis_priv.checkpoints.weights import WeightStore
from symbiosis_priv.errors import ConfigError, NonFiniteError
from symbiosis_priv.harness import strategies as testing
from tenant.masking.paper_pool import PaperPool, PaperPoolBackend, PaperPoolOptions
from tenant.model.hf import RemoteConfig
from tenant.preparation.keys import prepare
from tenant.preparation.opening import Opening
from tenant.preparation.prepared import Preparation
from tests.tenant.conftest import NewFederation, NewProvider, Scripted, Tape
from tests.tenant.scripted import ScriptedProvider

UNIT = 2.0**-24  # relative rounding error of float32
TINY = 2.0**-149  # absolute rounding error of float32, at underflow


def gamma(terms: int) -> float:
    """A float32 sum of `terms` rounded products is off by at most this factor times the sum of their magnitudes.

    This holds for every order of summation (Higham, Accuracy and Stability, §3.1).
    """
    return terms * UNIT / (1 - terms * UNIT)


def error_bound(sent: Tensor, noise: Tensor, weight: Tensor, bias: Tensor, result: Tensor) -> Tensor:
    """Bound of the difference between `fl(fl(z @ W.T + b) - fl(n @ W.T))` and `x @ W.T + b`, where z = fl(x + n).

    x + n is rounded once; both products have d terms (one more with the bias); the difference is rounded once. `noise`
    bounds |n|.
    """
    w = weight.abs().t()
    width = weight.shape[1]
    addition = (UNIT * sent.abs()) @ w
    products = gamma(width + 1) * (sent.abs() @ w + bias.abs()) + gamma(width) * (noise.abs() @ w)
    return (addition + products) * (1 + 4 * UNIT) + UNIT * result.abs() + 4 * width * TINY


Open = Callable[..., PaperPoolBackend]


@pytest.fixture
def open_backend(
    new_provider: NewProvider, new_federation: NewFederation, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Open]:
    opened = []

    def make(store: WeightStore, *, provider: ScriptedProvider | None = None, **options: Any) -> PaperPoolBackend:
        digest = store.manifest().digest
        with pytest.warns(UserWarning, match="it can read every row"):
            backend = PaperPoolBackend(
                new_federation([provider or new_provider(store=store)], digest=digest),
                prepare(store, digest=digest, cache=tmp_path_factory.mktemp("cache")),
                PaperPoolOptions(pool_size=options.pop("pool_size", 3), noise_scale=options.pop("noise_scale", 16.0)),
                deadline_s=20.0,
                **options,
            )
        opened.append(backend)
        return backend

    yield make
    for backend in opened:
        backend.close()


def test_one_executor_with_all_layers_is_asked(scripted: Scripted, preparation: Preparation) -> None:
    part, whole, other = scripted.new_provider(), scripted.new_provider(), scripted.new_provider()
    federation = scripted.new_federation([part, whole, other])
    first, *others = federation.executors
    split = replace(first, layers=LayerRange(0, 0))
    options = PaperPoolOptions(pool_size=1)
    with (
        pytest.warns(UserWarning, match="it can read every row"),
        PaperPoolBackend(replace(federation, peers=(split, *others)), preparation, options, deadline_s=20.0) as backend,
    ):
        backend.linear(0, FORWARD, torch.ones(1, 64))
    assert [bool(provider.executed) for provider in (part, whole, other)] == [False, True, False]
    with pytest.raises(ConfigError, match="listed with a part"):
        PaperPoolBackend(replace(federation, peers=(split,)), preparation, options, deadline_s=20.0)


@pytest.mark.parametrize("name", ["store", "gpt2_store"])
def test_products_are_within_the_derived_bound(
    open_backend: Open, request: pytest.FixtureRequest, name: str, tape: Tape
) -> None:
    """The bound holds with bias (GPT-2) and without (Llama), forward and backward."""
    store: WeightStore = request.getfixturevalue(name)
    backend = open_backend(store, wiretap=tape)
    layers = [store.layers(i) for i in range(len(store.manifest().groups))]
    pools: dict[tuple[int, Direction], Tensor] = {}

    @given(data=st.data(), index=st.sampled_from(range(4)), direction=testing.directions(), count=st.integers(1, 20))
    @settings(max_examples=40, suppress_health_check=list(HealthCheck))
    def within(data: st.DataObject, index: int, direction: Direction, count: int) -> None:
        width = backend.facts[index].inputs(direction)
        x = data.draw(testing.float_rows(width=width, count=count, dtypes=[torch.float32], largest=1e6))
        tape.frames.clear()
        got = backend.linear(index, direction, x)
        frames = tape.executed()
        if len(frames) == 2:  # the first call sends the noise itself, bias-free
            pools[index, direction] = frames[0][1]
        message, sent = frames[-1]
        assert message.arithmetic == ("float" if direction == FORWARD else "float_bias_free")
        pool = pools[index, direction]
        assert bool((sent[:, None] == x[:, None] + pool[None]).all(dim=2).any(dim=1).all())  # rounded once
        sent, noise = sent.double(), pool.double().abs().amax(dim=0, keepdim=True)  # for every noise row
        weight = torch.cat([layer.weight.double() for layer in layers[index]])
        biases = [torch.zeros(len(m.weight)) if m.bias is None else m.bias for m in layers[index]]
        bias = torch.cat(biases).double()
        if direction != FORWARD:
            weight, bias = weight.t(), torch.zeros(weight.shape[1]).double()
        truth = x.double() @ weight.t() + bias
        bound = error_bound(sent, noise, weight, bias, got)
        assert bool(((got - truth).abs() <= bound).all())

    within()
    assert len(pools) > 2


def test_noise_does_not_come_from_torch(open_backend: Open, store: WeightStore, tape: Tape) -> None:
    for _ in range(2):
        torch.manual_seed(0)
        open_backend(store, wiretap=tape).linear(0, FORWARD, torch.ones(1, 64))
    noises = [rows for message, rows in tape.executed() if message.arithmetic == "float_bias_free"]
    assert len(noises) == 2
    assert not torch.equal(*noises)


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_non_finite_rows_are_an_error_before_a_byte_is_sent(
    open_backend: Open, store: WeightStore, new_provider: NewProvider, poison: float
) -> None:
    executor = new_provider()
    backend = open_backend(store, provider=executor)
    x = torch.zeros(2, 64)
    x[1, 1] = poison
    with pytest.raises(NonFiniteError, match="nothing was sent"):
        backend.linear(0, FORWARD, x)
    assert executor.hellos == []


def test_a_narrow_ring_is_refused() -> None:
    config = RemoteConfig(federation="federation.toml", masking="paper-pool", ring_bits=24)
    with pytest.raises(ConfigError, match=r"RemoteConfig\(ring_bits=32\)"):
        PaperPool().open(Opening(config, "model"))
