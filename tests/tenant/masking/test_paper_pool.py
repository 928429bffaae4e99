"""The paper's own masking: right to the rounding of the executor's products, opt-in, with a warning."""

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
from symbiosis_priv.network import wire
from tenant.masking.paper_pool import PaperPool, PaperPoolBackend, PaperPoolOptions
from tenant.model.hf import RemoteConfig
from tenant.options import Options
from tenant.preparation.keys import prepare
from tenant.preparation.opening import Opening
from tenant.preparation.prepared import Preparation
from tests.tenant.conftest import NewFederation, NewProvider, Scripted, Tape
from tests.tenant.scripted import ScriptedProvider

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
                PaperPoolOptions(pool_size=3),
                Options(deadline_s=20.0, **options),
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
    options = PaperPoolOptions(pool_size=1), Options(deadline_s=20.0)
    with (
        pytest.warns(UserWarning, match="it can read every row"),
        PaperPoolBackend(replace(federation, peers=(split, *others)), preparation, *options) as backend,
    ):
        backend.linear(0, FORWARD, torch.ones(1, 64))
    assert [bool(provider.executed) for provider in (part, whole, other)] == [False, True, False]
    with pytest.raises(ConfigError, match="listed with a part"):
        PaperPoolBackend(replace(federation, peers=(split,)), preparation, *options)


@pytest.mark.parametrize("name", ["store", "gpt2_store"])
def test_a_product_is_the_answer_less_the_effect_of_the_noise(
    open_backend: Open, request: pytest.FixtureRequest, name: str, tape: Tape
) -> None:
    """With bias (GPT-2) and without (Llama), forward and backward. The effects of the noise have no bias."""
    store: WeightStore = request.getfixturevalue(name)
    backend = open_backend(store, wiretap=tape)
    pools: dict[tuple[int, Direction], tuple[Tensor, Tensor]] = {}

    @given(data=st.data(), index=st.sampled_from(range(4)), direction=testing.directions(), count=st.integers(1, 20))
    @settings(max_examples=40, suppress_health_check=list(HealthCheck))
    def exact(data: st.DataObject, index: int, direction: Direction, count: int) -> None:
        width = backend.facts[index].inputs(direction)
        x = data.draw(testing.float_rows(width=width, count=count, dtypes=[torch.float32], largest=1e6))
        tape.frames.clear()
        got = backend.linear(index, direction, x)
        matrices = [matrix for _, _, message, matrix in tape.frames if isinstance(message, wire.Binding)]
        *first, sent, answer = [matrix for matrix in matrices if matrix is not None]
        if (index, direction) not in pools:
            noise, effect = first
            pools[index, direction] = noise, effect
        noise, effect = pools[index, direction]
        arithmetic = [message.arithmetic for message, _ in tape.executed()]
        assert arithmetic == ["float_bias_free"] * (len(first) // 2) + [
            "float" if direction == FORWARD else "float_bias_free"
        ]
        is_pick = (sent[:, None] == x[:, None] + noise[None]).all(dim=2)
        is_right = (got[:, None] == (answer[:, None] - effect[None]).double()).all(dim=2)
        assert bool((is_pick & is_right).any(dim=1).all())

    exact()
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
