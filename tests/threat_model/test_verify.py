"""`verify` finds every fault that is planted in a real provider, names the property, and has no false alarm.

The provider runs in this process, behind its gateway and TLS. Faults are planted in its model or its executor.
"""

import itertools
import math
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, get_args

import msgspec
import numpy as np
import pytest
import torch
import typer
from hypothesis import given, settings, strategies as st
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel
from typer.testing import CliRunner

from provider.config.schema import ExecutorConfig, ModelConfig, ProviderConfig
from provider.executor.executor import Executor
from provider.gateway import connection
from provider.gateway.frames import Frames
from provider.products.model import FloatGroups, ServedModel
from provider.refusal import Refusal
from provider.serve import Provider
from symbiosis_priv.arithmetic.ring import FORWARD
from symbiosis_priv.arithmetic.segments import Counts
from symbiosis_priv.certificates import issuing
from symbiosis_priv.certificates.reading import Identity, Kind
from symbiosis_priv.checkpoints.layers import LayerRange
from symbiosis_priv.checkpoints.manifest import Manifest
from symbiosis_priv.checkpoints.weights import WeightStore
from symbiosis_priv.errors import CheckpointError, ConnectionLostError
from symbiosis_priv.federation import Peer
from symbiosis_priv.harness import strategies as testing
from symbiosis_priv.harness.local import LocalFederation
from symbiosis_priv.kernels import RingMatrix
from symbiosis_priv.network import wire
from symbiosis_priv.network.addresses import parse_address
from tests.experts import write
from tests.provider.clients import config_of
from tests.warm import run
from threat_model.cli import verify as verify_command
from threat_model.conformance import trials
from threat_model.conformance.oracle import Oracle, first_difference
from threat_model.conformance.properties import PROPERTIES
from threat_model.conformance.subject import Case, Subject, Violation
from threat_model.conformance.trials import Property, PropertyResult, passed, verify

EXAMPLES = 20
DEADLINE_S = 60.0


def make_checkpoint(path: Path, *, seed: int, layers: int = 1) -> Path:
    torch.manual_seed(seed)
    config = GPT2Config(
        vocab_size=61, n_positions=32, n_embd=40, n_layer=layers, n_head=4, bos_token_id=0, eos_token_id=0
    )
    base = GPT2LMHeadModel(config)
    for name, parameter in base.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter)
    base.save_pretrained(path)
    return path


@pytest.fixture(autouse=True)
def fewer_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests of the largest size are smaller, and faster."""
    monkeypatch.setattr("provider.gateway.admission.MAX_REQUEST_ROWS", 2048)


@dataclass(frozen=True)
class Place:
    """A checkpoint, another one of the same shape, certificates, a cache."""

    folder: Path
    checkpoint: Path
    other: Path
    authority: Identity
    provider: Identity
    tenant: Identity

    @property
    def store(self) -> WeightStore:
        return WeightStore(self.checkpoint, cache=self.folder / "cache")

    def config(self, *, checkpoint: Path | None = None, floats: bool = True, **limits: float) -> ProviderConfig:
        executor = ExecutorConfig(threads=1, float_memory_mib=2048 if floats else None)
        return config_of(
            checkpoint or self.checkpoint,
            cache=self.folder / "cache",
            own=self.provider,
            authority=self.authority,
            **{"log_level": "info", "executor": executor} | limits,
        )

    def subject(self, provider: Provider, oracle: Oracle, role: wire.Role = "executor", **more: Any) -> Subject:
        host, port = parse_address(provider.address)
        peer = Peer(role, "somebody", role, host, port, self.provider.certificate, **more)
        return Subject(peer, self.tenant, oracle, DEADLINE_S)

    def judge(
        self,
        *names: str,
        oracle: Oracle,
        role: wire.Role = "executor",
        config: ProviderConfig | None = None,
        **options: Any,
    ) -> dict[str, PropertyResult]:
        """Run all or some properties against a provider; results by property, in order."""
        chosen = [p for p in PROPERTIES if not names or p.name in names]
        with Provider(config or self.config()) as provider:
            found = verify(
                [self.subject(provider, oracle, role)], chosen, **({"examples": EXAMPLES, "seed": 1} | options)
            )
            return {o.property.name: o for o in found}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    folder = tmp_path_factory.mktemp("verify")
    authority = issuing.create_authority(folder)
    return Place(
        folder=folder,
        checkpoint=make_checkpoint(folder / "model", seed=0),
        other=make_checkpoint(folder / "other", seed=1),
        authority=authority,
        provider=issuing.issue(folder, authority=None, kind=Kind.PROVIDER, name="alpha"),
        tenant=issuing.issue(folder, authority=authority, kind=Kind.TENANT, name="alice"),
    )


@pytest.fixture(scope="module")
def oracle(place: Place) -> Oracle:
    return Oracle(place.store, seed=0)


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine must not make a counterexample larger."""
    monkeypatch.setattr(trials, "_SHRINKING_S", 300.0)


Judge = Callable[..., dict[str, PropertyResult]]


@pytest.fixture
def judge(place: Place, oracle: Oracle) -> Judge:
    """`judge(...)`: `place.judge` for a provider of the checkpoint that a test has changed."""
    return partial(place.judge, oracle=oracle)


def violation_of(outcome: PropertyResult) -> Violation:
    assert outcome.violation is not None
    return outcome.violation


def case_of(outcome: PropertyResult) -> Case:
    """The counterexample."""
    case = violation_of(outcome).case
    assert case is not None
    return case


def broken(outcomes: dict[str, PropertyResult]) -> set[str]:
    unanswered = {name: o.reason for name, o in outcomes.items() if o.verdict == "no answer"}
    assert not unanswered
    return {name for name, outcome in outcomes.items() if outcome.verdict == "broken"}


Product = Callable[..., Tensor]
Plant = Callable[[object, str, Callable[..., Any]], None]


@pytest.fixture
def plant(monkeypatch: pytest.MonkeyPatch) -> Plant:
    """`plant(owner, name, fault)`: what is called as `owner.name(...)` becomes `fault(honest, ...)`."""

    def plant(owner: object, name: str, fault: Callable[..., Any]) -> None:
        honest = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *given, **named: fault(honest, *given, **named))

    return plant


@pytest.fixture
def tamper(plant: Plant) -> Callable[[Callable[..., Tensor]], None]:
    """`tamper(fault)`: products become `fault(honest, served, rows, index=..., direction=..., arithmetic=...)`."""

    def tamper(fault: Callable[..., Tensor]) -> None:
        def product(honest: Product, served: ServedModel, rows: Tensor, **which: Any) -> Tensor:
            return fault(lambda rows, **other: honest(served, rows, **(which | other)), rows, **which).contiguous()

        plant(ServedModel, "product", product)
        plant(ServedModel, "few", lambda *_: None)  # no product is computed elsewhere

    return tamper


# No false alarms


@pytest.mark.parametrize("role", ["executor", "helper"])
def test_an_honest_provider_passes(judge: Judge, role: wire.Role) -> None:
    outcomes = judge(role=role)
    assert not broken(outcomes), [o.violation.lines() for o in outcomes.values() if o.violation]
    untested = {name for name, outcome in outcomes.items() if outcome.verdict == "not tested"}
    assert untested == {"experts"}
    assert all(outcome.examples for outcome in outcomes.values() if outcome.verdict == "holds")


def test_a_provider_with_small_limits_passes(judge: Judge, place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("provider.gateway.admission.MAX_REQUEST_ROWS", 3)
    assert not broken(judge(config=place.config(max_connections_per_tenant=5)))


def test_a_provider_without_floats_passes(judge: Judge, place: Place) -> None:
    outcomes = judge(config=place.config(floats=False))
    assert not broken(outcomes)
    floats = {p.name for p in PROPERTIES if p.floats}
    assert {name for name, o in outcomes.items() if o.verdict == "not served"} == floats
    assert all("float_memory_mib under [executor]" in str(outcomes[name].reason) for name in floats)


class Claimed:
    """A provider that claims other layers than it serves; it serves all."""

    start, stop = 4, 8

    def __contains__(self, group: int) -> bool:
        return True

    def __len__(self) -> int:
        return 4


def test_a_provider_of_some_layers_is_tested_on_these_layers(place: Place, tmp_path: Path) -> None:
    """A provider serves the second of two layers: no false alarm, missing layers of the file, and a wrong claim."""
    path = make_checkpoint(tmp_path / "model", seed=2, layers=2)
    oracle = Oracle(WeightStore(path, cache=tmp_path), seed=0)
    whole = msgspec.structs.replace(place.config(), model=ModelConfig(checkpoint=str(path), cache=tmp_path))
    part = msgspec.structs.replace(whole, model=msgspec.structs.replace(whole.model, layers="1"))

    # only the property `layers` reads the expected layers
    few = [p for p in PROPERTIES if p.name in ("digest", "layers", "every-layer")]

    def outcomes(
        provider: Provider, role: wire.Role, expected: str | None, properties: Sequence[Property] = PROPERTIES
    ) -> dict[str, PropertyResult]:
        layers = None if expected is None else LayerRange.parse(expected)
        subject = place.subject(provider, oracle, role, layers=layers)
        assert subject.groups == range(4, 8)
        return {o.property.name: o for o in verify([subject], properties, examples=5, seed=1)}

    with Provider(part) as provider:
        for role in get_args(wire.Role):
            for expected, properties in (None, few), ("1", PROPERTIES):
                found = outcomes(provider, role, expected, properties)
                assert not broken(found), [o.violation.lines() for o in found.values() if o.violation]
            found = outcomes(provider, role, "0-1", few)
            assert broken(found) == {"layers"}
            assert "serves layers 1, and the federation file expects 0-1" in str(found["layers"].violation)
    with Provider(whole) as provider:
        assert provider._gateway is not None
        object.__setattr__(provider._gateway.state, "served", Claimed())
        found = outcomes(provider, "executor", None)
        assert broken(found) == {"layers"}
        assert "for a layer that it says it does not serve" in str(found["layers"].violation)


@pytest.fixture(scope="module")
def mixture(place: Place) -> Place:
    """A mixture of experts."""
    path = write("Mixtral", place.folder / "mixture", intermediate_size=64, num_hidden_layers=1)
    return replace(place, checkpoint=path)


@pytest.fixture
def judge_experts(mixture: Place) -> Judge:
    """`judge` for a provider of the mixture."""
    oracle = Oracle(mixture.store, seed=0)
    return partial(mixture.judge, oracle=oracle, config=mixture.config(floats=False))


@pytest.mark.parametrize("role", ["executor", "helper"])
def test_an_honest_provider_of_experts_passes(judge_experts: Judge, role: wire.Role) -> None:
    outcomes = judge_experts(role=role)
    assert not broken(outcomes), [o.violation.lines() for o in outcomes.values() if o.violation]
    assert outcomes["experts"].verdict == "holds"


@pytest.mark.parametrize("role", ["executor", "helper"])
def test_rows_multiplied_by_another_expert_are_found(
    judge_experts: Judge, tamper: Callable[[Callable[..., Tensor]], None], role: wire.Role
) -> None:
    def fault(honest: Product, rows: Tensor, *, counts: Counts | None, **which: Any) -> Tensor:
        return honest(rows) if counts is None else honest(rows, counts=(*counts[1:], counts[0]))

    tamper(fault)
    outcomes = judge_experts("experts", "every-layer", "binding", role=role)
    assert broken(outcomes) == {"experts"}
    assert any("rows of every expert" in line for line in violation_of(outcomes["experts"]).lines())


def test_a_reply_with_other_counts_is_found(judge_experts: Judge, plant: Plant) -> None:
    plant(
        wire.Result,
        "answering",
        lambda honest, request, **more: honest(msgspec.structs.replace(request, counts=None), **more),
    )
    outcomes = judge_experts("binding")
    assert broken(outcomes) == {"binding"}
    assert "counts" in str(outcomes["binding"].violation)


# Planted faults


@pytest.mark.parametrize("group", [0, 2])
def test_one_weight_altered_by_one_unit_is_found_and_located(judge: Judge, plant: Plant, group: int) -> None:
    output, column = 17, 29

    def altered(honest: object, store: WeightStore, index: int) -> RingMatrix:
        weight = store.group(index).weight.clone()
        weight[output, column] += index == group
        return RingMatrix(weight, weight_bits=store.weight_bits)

    plant(WeightStore, "matrix", altered)
    outcome = judge("every-layer")["every-layer"]
    assert outcome.verdict == "broken"
    case, difference = case_of(outcome), violation_of(outcome).difference
    assert difference is not None
    assert (case.index, case.direction, case.arithmetic) == (group, FORWARD, "ring")
    # shrunk to the one column of the altered weight
    assert case.rows.nonzero().tolist() == [[0, column]]
    assert (difference.row, difference.column) == (0, output)
    got, expected = torch.tensor([difference.got, difference.expected], dtype=torch.int32)
    assert got - expected == case.rows[0, column]  # one unit


@pytest.mark.parametrize("steps", [1, -1])
def test_one_float_weight_altered_by_one_step_is_found(judge: Judge, plant: Plant, steps: int) -> None:
    def altered(honest: Callable[..., Any], groups: FloatGroups, index: int) -> Any:
        loaded = index in groups.loaded
        weight, bias = honest(groups, index)
        if index == 1 and not loaded:
            weight[5, 33] += steps * weight[5].abs().max() / 511
        return weight, bias

    plant(FloatGroups, "group", altered)
    case = case_of(judge("every-layer")["every-layer"])
    assert (case.index, case.arithmetic) == (1, "float")
    assert case.rows.nonzero().tolist() == [[0, 33]]


ANSWERS = itertools.count()
WRONG_PRODUCTS: dict[str, tuple[Callable[..., Tensor], str, str]] = {
    "rounding in the ring": (
        lambda honest, rows, *, arithmetic, **which: honest(rows) & ~1 if arithmetic == "ring" else honest(rows),
        *("digest ring-exact float bias-free binding", "ring-exact"),
    ),
    "rounding on the float path": (
        lambda honest, rows, *, arithmetic, **which: honest(rows if arithmetic == "ring" else rows.bfloat16().float()),
        *("ring-exact float bias-free", "float bias-free"),
    ),
    "the bias on the bias-free path": (
        lambda honest, rows, *, arithmetic, **which: honest(rows, arithmetic=arithmetic.removesuffix("_bias_free")),
        *("ring-exact float bias-free", "bias-free"),
    ),
    "no bias on the biased path": (
        lambda honest, rows, *, arithmetic, **which: honest(
            rows, arithmetic="ring" if arithmetic == "ring" else "float_bias_free"
        ),
        *("ring-exact float bias-free", "float"),
    ),
    "an answer that depends on the one before": (
        lambda honest, rows, *, arithmetic, **which: honest(rows) + (arithmetic == "ring") * (next(ANSWERS) > 2),
        *("ring-exact float bias-free binding", "ring-exact"),
    ),
}


@pytest.mark.parametrize(("answer", "said"), [("hello", "for an unknown model"), ("health", "its health report names")])
def test_a_digest_that_a_provider_only_repeats_is_found(judge: Judge, plant: Plant, answer: str, said: str) -> None:
    """One provider welcomes tenants of any model, and one names another model in its health report."""

    def lying(honest: Callable[..., None], served: Any, *request: Any) -> None:
        asked, own = (request[0].model_digest if request else "sha256:0"), served._state.digest
        served._state.digest = asked
        honest(served, *request)
        served._state.digest = own

    plant(connection.Connection, f"_answer_{answer}", lying)
    outcome = judge("digest")["digest"]
    assert said in violation_of(outcome).what


@pytest.mark.parametrize("name", WRONG_PRODUCTS)
def test_wrong_products(judge: Judge, tamper: Callable[..., None], name: str) -> None:
    fault, names, found = WRONG_PRODUCTS[name]
    tamper(fault)
    assert broken(judge(*names.split())) == set(found.split())


def test_a_float_ring_product_is_found(judge: Judge, place: Place, tamper: Callable[..., None]) -> None:
    """Right for small rows, wrong for large ones: a kernel that is exact only up to 2^24."""

    tamper(lambda honest, rows, **which: honest(rows).to(torch.float32).to(torch.int64).to(torch.int32))
    outcomes = judge("ring-exact", "every-layer", config=place.config(floats=False))
    assert broken(outcomes) == {"ring-exact", "every-layer"}
    case = case_of(outcomes["ring-exact"])
    assert len(case.rows.nonzero()) == 1  # shrunk: one row, one column
    assert len(case.rows) == 1


def test_rows_that_affect_each_other(judge: Judge, tamper: Callable[..., None]) -> None:
    """A provider that quantises by batch: the first of several rows changes the last one."""

    def meets(honest: Product, rows: Tensor, *, arithmetic: str, **which: Any) -> Tensor:
        y = honest(rows)
        if arithmetic == "ring" and len(y) > 1:
            y[-1] += y[0] & 1
        return y

    tamper(meets)
    outcomes = judge("ring-exact", "every-layer", "float")
    assert broken(outcomes) == {"ring-exact", "every-layer"}
    assert len(case_of(outcomes["ring-exact"]).rows) == 2


def test_wrong_batching_only(judge: Judge, plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    """Single requests are answered correctly; in a batch, the slices go to the wrong requests."""
    monkeypatch.setattr(trials, "_SHRINKING_S", 0.0)  # each try makes connections, and no size is compared
    batches = []

    def hand_out(honest: Callable[..., None], executor: Executor, batch: list[Any], product: Tensor, how: Any) -> None:
        batches.append(len(batch))
        honest(executor, batch, product.roll(1, 0) if len(batch) > 1 else product, how)

    plant(Executor, "_hand_out", hand_out)
    outcomes = judge()
    assert max(batches) > 1  # the suite did cause a batch
    assert broken(outcomes) == {"batching"}


def test_wrong_narrow_payloads_only(judge: Judge, plant: Plant) -> None:
    """Planted: the provider drops the signs of narrow answers."""

    def unsigned(honest: Callable[..., memoryview], encoding: wire.Encoding, matrix: Any) -> memoryview:
        return honest(encoding, matrix & 0x7FFFFF if isinstance(matrix, np.ndarray) else matrix)

    plant(wire.Encoding, "pack", unsigned)
    assert "narrow-ring" in broken(judge("ring-exact", "narrow-ring"))


def test_replies_bound_to_another_request(judge: Judge, plant: Plant) -> None:
    def unbound(honest: Callable[..., None], served: Any, request: wire.Execute, *given: Any, **named: Any) -> None:
        honest(served, msgspec.structs.replace(request, nonce=bytes(wire.NONCE_BYTES)), *given, **named)

    plant(connection.Connection, "_multiply", unbound)
    outcomes = judge()
    assert broken(outcomes) == {"binding"}
    assert "nonce" in violation_of(outcomes["binding"]).what


def test_a_connection_that_ends_at_a_bad_request(judge: Judge, plant: Plant) -> None:
    def hang_up(*_: object) -> None:
        raise ConnectionResetError

    plant(Frames, "refuse", hang_up)
    found = broken(judge("ring-exact", "refusals", "binding"))
    assert found == {"refusals"}


def test_bad_requests_that_are_answered(judge: Judge, plant: Plant) -> None:
    """A provider that maps a group that does not exist to one that does."""

    def existing(request: Any, manifest: Manifest) -> Any:
        return msgspec.structs.replace(request, group=request.group % len(manifest.groups))

    def lenient(honest: Callable[..., Any], served: Any, request: Any) -> Any:
        return honest(served, existing(request, served._state.manifest))

    def wrap(honest: Callable[..., Any], executor: Executor, sender: Any, work: Any, payload: Any) -> Any:
        if isinstance(work.request, wire.Execute):
            work = msgspec.structs.replace(work, request=existing(work.request, executor._model.manifest))
        return honest(executor, sender, work, payload)

    plant(connection.Connection, "_check", lenient)
    plant(Executor, "_job_of", wrap)
    outcomes = judge("refusals", "ring-exact")
    assert broken(outcomes) == {"refusals"}
    assert "a group that does not exist" in violation_of(outcomes["refusals"]).what


def test_a_second_hello_that_is_answered(judge: Judge, plant: Plant) -> None:
    def forgetful(honest: Callable[..., None], served: Any, hello: wire.Hello) -> None:
        if served._role is not None:
            served._state.register.drop_role(served._tenant, served._role)
        served._role = None
        honest(served, hello)

    plant(connection.Connection, "_answer_hello", forgetful)
    outcomes = judge("refusals", "ring-exact")
    assert broken(outcomes) == {"refusals"}
    assert "answers a second hello with welcome" in violation_of(outcomes["refusals"]).what


def test_a_malformed_frame_that_is_answered(judge: Judge, plant: Plant) -> None:
    """A provider that ignores fields that it does not know."""

    def lenient(honest: Callable[..., wire.Request], header: wire.Buffer) -> wire.Request:
        return wire.FetchHealth() if "scale" in msgspec.msgpack.decode(header) else honest(header)

    plant(wire, "decode_request", lenient)
    outcomes = judge("refusals", "ring-exact")
    assert broken(outcomes) == {"refusals"}
    assert "a malformed frame (execute: {'scale': 0.5})" in violation_of(outcomes["refusals"]).what


def test_effects_of_other_masks(judge: Judge, plant: Plant) -> None:
    """A helper that restarts its keystream for every request."""

    def restarted(honest: Product, served: ServedModel, request: wire.Effect) -> Tensor:
        return honest(served, msgspec.structs.replace(request, first_row=0))

    plant(ServedModel, "mask_rows", restarted)
    outcomes = judge("effect-exact", "every-layer", role="helper")
    assert broken(outcomes) == {"effect-exact"}
    assert case_of(outcomes["effect-exact"]).first_row == 1


def test_one_group_backward_only(judge: Judge, tamper: Callable[..., None]) -> None:
    def mixed_up(honest: Product, rows: Tensor, *, index: int, direction: str, **which: Any) -> Tensor:
        y = honest(rows)
        return y.flip(1) if (index, direction) == (2, "backward") else y

    tamper(mixed_up)
    outcomes = judge("every-layer", "batching")
    assert broken(outcomes) == {"every-layer"}  # always wrong, but only this property's fault
    case = case_of(outcomes["every-layer"])
    assert (case.index, case.direction) == (2, "backward")


def test_answers_that_are_wrong_only_for_many_rows(judge: Judge, tamper: Callable[..., None]) -> None:
    def last_row(honest: Product, rows: Tensor, *, arithmetic: str, **which: Any) -> Tensor:
        y = honest(rows)
        y[-1:] += arithmetic == "ring" and len(rows) > 500
        return y

    tamper(last_row)
    outcomes = judge("every-layer", "ring-exact", "row-counts")
    assert broken(outcomes) == {"row-counts"}
    assert len(case_of(outcomes["row-counts"]).rows) == 501  # the smallest row count


def test_a_provider_that_refuses_empty_requests(judge: Judge, plant: Plant) -> None:
    def refuse(honest: Callable[..., None], served: Any, request: Any, sizes: Any, **how: Any) -> None:
        if not request.rows:
            raise Refusal(wire.ErrorCode.INTERNAL, "no rows")
        honest(served, request, sizes, **how)

    plant(connection.Connection, "_answer_product", refuse)
    outcome = judge("row-counts")["row-counts"]
    assert "refuses a valid request: internal" in violation_of(outcome).what
    assert not len(case_of(outcome).rows)


def test_an_unreachable_provider_is_not_reported_as_dishonest(place: Place, oracle: Oracle) -> None:
    with Provider(place.config()) as provider:
        subject = place.subject(provider, oracle)
    outcomes = list(verify([subject], PROPERTIES, examples=EXAMPLES, seed=0))
    assert [o.verdict for o in outcomes[:2]] == ["no answer"] * 2
    assert {o.verdict for o in outcomes[2:]} == {"not tested"}
    assert {o.reason for o in outcomes[2:]} == {"it has not answered at all"}
    assert outcomes[0].reason is not None
    assert "is it running?" in outcomes[0].reason


def test_a_slow_provider_does_not_exceed_its_time_limit(judge: Judge, tamper: Callable[..., None]) -> None:
    def slow(honest: Product, rows: Tensor, **which: Any) -> Tensor:
        time.sleep(0.3)
        return honest(rows)

    tamper(slow)
    begun = time.monotonic()
    outcomes = list(judge(budget_s=1.0).values())
    assert time.monotonic() - begun < 60.0  # otherwise hundreds of answers at 0.3 s each
    late = next(i for i, o in enumerate(outcomes) if o.verdict == "out of time")
    assert {o.verdict for o in outcomes[late + 1 :]} == {"not tested"}
    assert not passed(outcomes)


@pytest.mark.parametrize("code", [wire.ErrorCode.ROLE_REFUSED, wire.ErrorCode.REFUSED])
def test_a_provider_that_avoids_all_products_does_not_pass(code: wire.ErrorCode, judge: Judge, plant: Plant) -> None:
    """The provider shows the right digest, hangs up when a product is requested, and then refuses the tenant."""
    asked: list[object] = []

    def refuse(honest: Callable[..., None], served: Any, hello: wire.Hello) -> None:
        if asked:
            raise Refusal(code, "not now")
        honest(served, hello)

    def leave(honest: Callable[..., None], served: Any, request: Any, sizes: Any, **how: Any) -> None:
        if request.rows:
            asked.append(request)
            raise ConnectionLostError("left")
        honest(served, request, sizes, **how)

    plant(connection.Connection, "_answer_hello", refuse)
    plant(connection.Connection, "_answer_product", leave)
    outcomes = list(judge(examples=1).values())
    assert outcomes[0].verdict == "holds"
    assert not passed(outcomes)


# The oracle itself


@settings(max_examples=30)
@given(data=st.data())
def test_the_oracle_is_the_integer_product(oracle: Oracle, data: st.DataObject) -> None:
    """Compared with Python's own integers."""
    index = data.draw(st.sampled_from(oracle.sampled))
    direction = data.draw(testing.directions())
    width, _ = oracle.widths(index, direction)
    rows = data.draw(testing.ring_rows(width=width, count=2))
    integers, _, _ = oracle.group(index)
    weight = integers.T if direction == FORWARD else integers
    column = data.draw(st.integers(0, weight.shape[1] - 1))
    for row, got in zip(rows.tolist(), oracle.ring_product(index, direction, rows), strict=True):
        exact = sum(x * int(w) for x, w in zip(row, weight[:, column], strict=True))
        assert (int(got[column]) - exact) % 2**32 == 0


def test_nan_is_outside_every_bound() -> None:
    got, bound = torch.tensor([[1.0, math.nan]]), np.full((1, 2), math.inf)
    difference = first_difference(got, np.zeros((1, 2)), bound=bound)
    assert difference is not None
    assert difference.column == 1


def test_a_checkpoint_that_has_changed_is_no_oracle(place: Place, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(place.checkpoint, tmp_path / "model"))
    oracle = Oracle(WeightStore(copy, cache=tmp_path / "cache"), seed=0)
    shutil.copy(place.other / "model.safetensors", copy)
    with pytest.raises(CheckpointError, match="changed since its manifest was made"):
        oracle.group(0)


# The command


@pytest.fixture(scope="module")
def local(place: Place, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalFederation]:
    folder = tmp_path_factory.mktemp("federation")
    with LocalFederation(place.checkpoint, folder, provider_options={"executor": {"threads": 1}}) as local:
        yield local


def test_a_federation_from_the_command_line(local: LocalFederation, place: Place) -> None:
    command = [sys.executable, "-m", "symbiosis_priv.cli", "verify", "--examples", "10", "--seed", "5"]
    files = ["--federation", str(local.federation), "--model", str(place.checkpoint)]
    done = run([*command, *files], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "--seed 5 repeats them" in done.stdout
    tested = re.findall(r"^  (holds|broken|not tested|not served) +([a-z-]+) ", done.stdout, re.MULTILINE)
    floats = {p.name for p in PROPERTIES if p.floats}
    assert {verdict for verdict, name in tested if name not in floats | {"experts"}} == {"holds"}
    assert {verdict for verdict, name in tested if name == "experts"} == {"not tested"}  # it has none
    assert {verdict for verdict, name in tested if name in floats} == {"not served"}
    assert done.stdout.count("it serves no floats") == 1
    assert {("holds", "ring-exact"), ("holds", "effect-exact")} <= set(tested)


def fails(local: LocalFederation, federation: Path, model: Path, **changes: str) -> None:
    """Verify the providers of a federation file with some changed words; the command ends with status 1."""
    text = local.federation.read_text(encoding="utf-8")
    for old, new in changes.items():
        assert old in text
        text = text.replace(old, new)
    federation.write_text(text, encoding="utf-8")
    with pytest.raises(typer.Exit) as end:
        verify_command(federation=federation, model=str(model), examples=10)
    assert end.value.exit_code == 1


def test_another_model_than_the_pinned_one_is_served(
    local: LocalFederation, place: Place, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cache, models = place.folder / "cache", (place.checkpoint, place.other)
    digests = [WeightStore(path, cache=cache).manifest().digest for path in models]
    with pytest.raises(CheckpointError, match="cannot be compared"):
        verify_command(federation=local.federation, model=str(place.other))
    fails(local, tmp_path / "verify.toml", place.other, **{digests[0]: digests[1]})
    shown = capsys.readouterr().out
    assert "breaks digest" in shown
    assert "breaks every-layer" in shown
    assert re.search(r"answer\[\d+, \d+\]: got -?\d+, expected -?\d+", shown)


def test_the_wrong_role_is_reported_once_with_the_fix(
    local: LocalFederation, place: Place, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    swapped = {'role = "executor"': 'role = "neither"', 'role = "helper"': 'role = "executor"'}
    fails(local, tmp_path / "verify.toml", place.checkpoint, **swapped, **{'role = "neither"': 'role = "helper"'})
    shown = " ".join(capsys.readouterr().out.split())
    assert shown.count("does not serve this tenant as executor") == 1
    assert "correct its role in federation.toml" in shown


@pytest.mark.parametrize("option", ["--budget", "--deadline"])
@pytest.mark.parametrize("value", ["inf", "nan", "-1"])
def test_a_time_limit_is_a_finite_number_of_seconds(option: str, value: str) -> None:
    app = typer.Typer()
    app.command()(verify_command)
    result = CliRunner().invoke(app, [f"{option}={value}"])
    assert result.exit_code == 2
    assert option in result.output
