"""The thirteen rules of the design that must never be broken. `tests/mutations.toml` breaks most of them in one line,
and names the test here that must notice; the others have a planted breach here, which proves that their checker works.

    1  masks come from a CSPRG keystream                  7  replies are bound to requests and compared exactly
    2  a fresh secret per process; nothing is resumed     8  executor and helper are never the same operator
    3  a row is burnt before it leaves, and used once     9  what stays visible depends on shapes alone
    4  siblings share a mask, nothing else does          10  nothing in a folder overrides the tenant
    5  no scale, loss, label or token id leaves          11  parties are pairwise distinct, seeds bound to them
    6  verify before anything is used                    12  a secret lives in one process; forks are noticed
   13  P and hints of `lwe` come from the tenant, and nothing of c or e outlives its row
"""

import copy
import ctypes
import functools
import gc
import json
import os
import pickle
import select
import shutil
import signal
import struct
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM

from symbiosis_priv import errors
from symbiosis_priv.arithmetic import passes
from symbiosis_priv.arithmetic.ring import BACKWARD, FORWARD, quantise_rows
from symbiosis_priv.checkpoints.weights import WeightStore
from symbiosis_priv.limits import GroupIndex
from symbiosis_priv.network import wire
from tenant import RemoteConfig, backend_of
from tenant.core.pads import SessionSecret
from tenant.masking.backend import RingBackend
from tenant.masking.lwe import LweRows
from tenant.model.remote_linear import LayerGroup
from tenant.preparation.hints import make_hints
from tenant.preparation.keys import prepare
from tenant.preparation.prepared import Preparation
from tenant.session.session import Session
from tests.tenant.conftest import NewSession, Scripted, Tape
from tests.tenant.scripted import Heard, ScriptedProvider, frame, spoil
from tests.waiting import until

Patch = pytest.MonkeyPatch
encode = passes.encode
QKV, OUT = GroupIndex(0), GroupIndex(1)
IDS = torch.arange(1, 41).view(2, 20)


def ring_rows(preparation: Preparation, index: int = QKV, count: int = 4, *, direction: Any = FORWARD) -> Tensor:
    """Always the same rows, so that two frames of them differ only by their masks."""
    width = preparation.facts[index].inputs(direction)
    rows = torch.randn(count, width, generator=torch.Generator().manual_seed(7))
    return quantise_rows(rows, preparation.facts[index].bounds[direction])[0]


def masks_of(heard: Sequence[Heard], xq: Tensor) -> list[bytes]:
    """The masks, one per row, which an executor could compute if it knew the rows."""
    return [row.numpy().tobytes() for h in heard for row in h.rows - xq[: len(h.rows)]]


def repeats(items: Sequence[bytes]) -> int:
    return len(items) - len(set(items))


def is_uniform(rows: Tensor) -> bool:
    """Returns True if every byte position of int32 words passes a chi-square test. The false-alarm rate is below 1e-12
    in all: with 255 degrees of freedom, 255 + 9.5 * sqrt(2 * 255) = 470 has a tail below 1e-14."""
    words = rows.contiguous().numpy().view(np.uint8).reshape(-1, 4)
    assert len(words) >= 5 * 256, "too few words to tell"
    expected = len(words) / 256
    counts = [np.bincount(words[:, i], minlength=256) for i in range(4)]
    return all(float(((c - expected) ** 2 / expected).sum()) < 470 for c in counts)


@pytest.fixture
def split(llama: Path, federation: Path) -> Iterator[Any]:
    """A masked Llama with a LoRA adapter, at scripted providers."""
    config = RemoteConfig(federation=federation)
    base = AutoModelForCausalLM.from_pretrained(llama, quantization_config=config)
    torch.manual_seed(0)
    adapter = LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear", r=4, init_lora_weights=False)
    model = get_peft_model(base, adapter)
    yield model
    backend_of(model).close()


def train_a_step(model: Any, ids: Tensor = IDS) -> float:
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return float(loss.detach())


# Rule 1. Masks come from a CSPRG keystream.


def test_rule_1_a_training_seed_says_nothing_about_masks(scripted: Scripted) -> None:
    state = torch.get_rng_state()
    np_state = np.random.get_state(legacy=False)
    session = scripted.new_session("local")
    session.product(QKV, FORWARD, ring_rows(session.preparation))
    assert torch.equal(torch.get_rng_state(), state)
    assert repr(np.random.get_state(legacy=False)) == repr(np_state)
    scripted.executor.heard.clear()
    for _ in range(2):
        torch.manual_seed(0)
        np.random.seed(0)
        session = scripted.new_session("local")
        session.product(QKV, FORWARD, xq := ring_rows(session.preparation))
    assert repeats(masks_of(scripted.executor.executed, xq)) == 0


def test_rule_1_frames_are_uniform(new_session: NewSession, executor: ScriptedProvider) -> None:
    """Frames are uniform even if every row is zero. Masks that were rounded floats would fail."""
    session = new_session("local")
    session.product(QKV, FORWARD, torch.zeros(60, 64, dtype=torch.int32))
    assert is_uniform(executor.executed[-1].rows)


# Rule 2. A fresh secret per process, also after a fork; counters are never stored or resumed.


NO_ANSWER = b"no answer"


def in_a_fork(work: Callable[[], bytes], *, fork: Callable[[], int] = os.fork, wait_s: float = 60) -> bytes:
    """Return the output of a forked child, or `NO_ANSWER` after `wait_s` seconds."""
    reader, writer = os.pipe()
    child = fork()
    if not child:  # the child must not run pytest's code
        try:
            os.write(writer, work())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        ready, _, _ = select.select([pipe], [], [], wait_s)
        answer = pipe.read() if ready else NO_ANSWER
    os.kill(child, signal.SIGKILL)  # in case the child hangs
    os.waitpid(child, 0)
    return answer


def test_rule_2_nothing_is_resumed(new_session: NewSession, executor: ScriptedProvider) -> None:
    """A restarted program uses no mask row of its earlier runs."""
    for _ in range(3):
        session = new_session("local")
        session.product(QKV, FORWARD, xq := ring_rows(session.preparation))
        session.close()
    assert repeats(masks_of(executor.executed, xq)) == 0


@pytest.mark.parametrize("way", [copy.copy, copy.deepcopy, pickle.dumps])
def test_rule_2_counters_cannot_be_stored(way: Callable[[object], object]) -> None:
    with pytest.raises(errors.BurntRowError):
        way(SessionSecret())


# Rule 3. A row is burnt before its bytes leave; retries resend identical bytes; a recomputation takes new rows.


def test_rule_3_a_row_is_used_once(executor: ScriptedProvider, session: Session) -> None:
    """Over requests of many sizes, with an empty and a full pool."""
    xq = ring_rows(session.preparation, count=4096)
    for count in (3, 80, 1, 64, 65, 2, 80, 513, 1, 4096, 3, 4096, 2, 600, 600):
        session.product(QKV, FORWARD, xq[:count])
    assert repeats(masks_of(executor.executed, xq)) == 0


def test_rule_3_rows_are_burnt_before_they_leave(new_session: NewSession, executor: ScriptedProvider) -> None:
    """Mask rows of a request that failed while it was sent are not used again."""

    class Crash(Tape):
        def sent(self, peer: Any, message: wire.Message, payload: Tensor | None) -> None:
            super().sent(peer, message, payload)
            if len(self.executed()) == 1:
                raise KeyboardInterrupt

    session = new_session("local", wiretap=(crash := Crash()))
    xq = ring_rows(session.preparation)
    with pytest.raises(KeyboardInterrupt):
        session.product(QKV, FORWARD, xq)
    session.product(QKV, FORWARD, xq)
    (_, lost), _ = crash.executed()
    assert repeats([row.numpy().tobytes() for row in lost - xq] + masks_of(executor.executed, xq)) == 0


def test_rule_3_a_retry_resends_identical_bytes(new_session: NewSession, executor: ScriptedProvider) -> None:
    """An interrupted request is sent again."""

    def leave_twice(heard: Heard, reply: wire.Result, answer: Tensor) -> bytes | None:
        return frame(reply, answer) if len(executor.heard) > 2 else None

    executor.behaviour = leave_twice
    session = new_session("local")
    session.product(QKV, FORWARD, ring_rows(session.preparation))
    assert len(executor.heard) == 3
    assert len({heard.header + heard.payload for heard in executor.heard}) == 1


def test_rule_3_a_recomputation_takes_new_rows(split: Any, executor: ScriptedProvider) -> None:
    """Gradient checkpointing repeats a forward pass: the same rows get new masks."""
    layer = backend_of(split)
    linear = next(m for m in split.modules() if type(m).__name__ == "RemoteLinear")
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(7)).requires_grad_()
    checkpoint(lambda x: linear(x).square().sum(), x, use_reentrant=False).backward()
    xq, _ = quantise_rows(x.detach(), layer.facts[QKV].bounds[FORWARD])
    forward = [h for h in executor.executed if h.request.direction == FORWARD]
    assert len(forward) == 2
    assert repeats(masks_of(forward, xq)) == 0
    for heard in forward:
        assert not torch.equal(heard.rows, xq)


def test_rule_3_other_pads_leave_under_other_headers(scripted: Scripted) -> None:
    """A helper lies: the rows are sent again under another helper's pad, with another nonce."""
    liar, other = scripted.helper, scripted.new_provider()
    liar.behaviour = spoil
    session = scripted.new_session("pad", helpers=[liar, other], pad_helpers=1, pool_memory=0)
    session.routes.helpers[1].health.answered(0.0, seconds=9.0, size=1)  # the slower one, so that the liar is asked
    session.product(QKV, FORWARD, xq := ring_rows(session.preparation))
    first, second = scripted.executor.executed
    assert repeats(masks_of([first, second], xq)) == 0
    assert first.request.nonce != second.request.nonce


# Rule 4. Siblings share one mask; different inputs never do; backward is masked as forward is.


def test_rule_4_siblings_are_masked_once(split: Any, executor: ScriptedProvider) -> None:
    """Each (layer group, direction) is requested once in a step. The first layer needs no gradient of its input."""
    train_a_step(split)
    assert set(Counter((h.request.group, h.request.direction) for h in executor.executed).values()) == {1}


def test_rule_4_backward_is_masked_as_forward_is(split: Any, executor: ScriptedProvider) -> None:
    train_a_step(split)
    for direction in (FORWARD, BACKWARD):
        heard = [h for h in executor.executed if h.request.direction == direction]
        assert len(heard) >= 8
        assert all(is_uniform(h.rows) for h in heard)


def test_rule_4_layers_and_directions_share_no_mask(new_session: NewSession, executor: ScriptedProvider) -> None:
    """Another block's layers and the other direction have their own masks, although the widths are the same."""
    session = new_session("local")
    zeros = torch.zeros(8, 64, dtype=torch.int32)
    for index in (OUT, GroupIndex(OUT + 4)):  # 64 -> 64
        for direction in (FORWARD, BACKWARD):
            session.product(index, direction, zeros)
    assert repeats(masks_of(executor.executed, zeros)) == 0


# Rule 5. Scales, losses, labels and token ids never leave; formats do not depend on data.


def leaks(providers: Sequence[ScriptedProvider], secrets: dict[str, list[bytes]]) -> set[str]:
    """The `secrets` that can be found in sent bytes, and `format` if a frame differs from the protocol's format: a
    header is the canonical encoding of the layer, the direction, the row count, a nonce and (for helpers) a seed, and a
    payload is uniform words."""
    found = set()
    everything = b"\0".join(h.header + h.payload for p in providers for h in p.heard)
    for name, patterns in secrets.items():
        assert min(map(len, patterns)) >= 8  # shorter ones occur by chance
        if any(pattern in everything for pattern in patterns):
            found.add(name)
    for heard in (h for p in providers for h in p.heard):
        request = heard.request
        fields = set(msgspec.structs.asdict(request)) - set(wire.Binding.__struct_fields__)
        allowed = {"seed", "first_row"} if isinstance(request, wire.Effect) else set()
        if fields != allowed or request.arithmetic != "ring" or request.counts is not None:
            found.add("format")
        if heard.header != wire.encode(request, payload_bytes=len(heard.payload)):
            found.add("format")
        if isinstance(request, wire.Execute) and not is_uniform(heard.rows):
            found.add("format")
    nonces = [h.request.nonce for p in providers for h in p.heard]
    if repeats(nonces):
        found.add("format")
    return found


@pytest.fixture
def scales(monkeypatch: Patch) -> list[Tensor]:
    """The scales that are computed from now on."""
    found: list[Tensor] = []

    def spy(*args: Any, **kwargs: Any) -> Tensor:
        found.append(encode(*args, **kwargs))
        return found[-1]

    monkeypatch.setattr(passes, "encode", spy)
    return found


@pytest.fixture
def secrets_of_a_step(split: Any, scales: list[Tensor]) -> dict[str, list[bytes]]:
    """Train a step, and return the values that must not be seen, as bytes."""
    loss = train_a_step(split)
    ids = IDS.flatten()
    runs = [ids[i : i + 4] for i in range(0, len(ids), 4)]
    return {
        "scale": [struct.pack("<d", s) for scale in scales for s in scale.flatten().tolist()],
        "loss": [struct.pack("<d", loss)],
        "tokens": [run.to(dtype).numpy().tobytes() for run in runs for dtype in (torch.int32, torch.int64)],
    }


def test_rule_5_no_secret_leaves(secrets_of_a_step: dict[str, list[bytes]], scripted: Scripted) -> None:
    assert len(secrets_of_a_step["scale"]) == sum(h.request.rows for h in scripted.executor.executed)
    assert leaks([scripted.executor, scripted.helper], secrets_of_a_step) == set()


def test_rule_5_breach_a_scale_in_a_nonce(
    split: Any, scales: list[Tensor], scripted: Scripted, monkeypatch: Patch
) -> None:
    def nonce() -> bytes:
        return struct.pack("<d", float(scales[-1][0])) + os.urandom(8)

    monkeypatch.setattr("tenant.connections.executor_client.fresh_nonce", nonce)
    train_a_step(split)
    found = {"scale": [struct.pack("<d", float(scale[0])) for scale in scales]}
    assert leaks([scripted.executor, scripted.helper], found) == {"scale"}


# Rule 6. Verify before unmasking is used for anything; an abort carries no detail to the provider.


def spoil_the_last_row(heard: Heard, reply: wire.Result, answer: Tensor) -> tuple[wire.Result, Tensor]:
    answer[-1, 0] += 1
    return reply, answer


REFUSED = errors.ProtocolError, errors.VerificationError


@pytest.mark.parametrize(("masking", "liar"), [("pad", "executor"), ("pad", "helper"), ("none", "executor")])
def test_rule_6_no_lie_is_used(scripted: Scripted, masking: str, liar: str) -> None:
    """One entry is off by one."""
    {"executor": scripted.executor, "helper": scripted.helper}[liar].behaviour = spoil
    session = scripted.new_session(masking, pool_memory=0)
    with pytest.raises(REFUSED):
        session.product(QKV, FORWARD, ring_rows(session.preparation))


@pytest.mark.parametrize("liar", ["executor", "helper"])
def test_rule_6_no_row_is_returned_before_all_rows_have_passed(
    new_session: NewSession, executor: ScriptedProvider, helper: ScriptedProvider, liar: str
) -> None:
    """The last row is wrong: the caller gets no row of the product."""
    {"executor": executor, "helper": helper}[liar].behaviour = spoil_the_last_row
    session = new_session("pad", pool_memory=0)
    group = LayerGroup(RingBackend(session.preparation.facts, session), QKV)
    x = torch.randn(4, 64)
    with pytest.raises(errors.VerificationError):
        group.output(x, 0)
    assert group._thread_state.pending is None


@pytest.mark.parametrize("masking", ["none", "local", "pad"])
@pytest.mark.parametrize("ring_bits", [32, 24])
def test_rule_6_rows_of_zeros_of_a_bucket_are_checked(scripted: Scripted, masking: str, ring_bits: int) -> None:
    """Otherwise a provider could learn how many rows a bucket hides: it spoils one, and sees if it is caught."""
    for row in range(8):
        liar = scripted.new_provider()

        def spoil_one(heard: Heard, reply: wire.Result, answer: Tensor, row: int = row) -> tuple[wire.Result, Tensor]:
            answer[row, -1] += 1
            return reply, answer

        liar.behaviour = spoil_one
        helpers = [scripted.new_provider()] if masking == "pad" else []
        session = scripted.new_session(masking, [liar], helpers, row_bucket=8, ring_bits=ring_bits)
        with pytest.raises(errors.VerificationError):
            session.product(OUT, FORWARD, torch.ones(3, 64, dtype=torch.int32))
        assert [heard.request.rows for heard in liar.executed] == [8]


@pytest.mark.parametrize("error", [1, -(1 << 31)])
def test_rule_6_an_abort_tells_the_provider_nothing(
    new_session: NewSession, executor: ScriptedProvider, error: int
) -> None:
    """After a small error or one of half the ring, the provider gets no further request, whatever the tenant does."""
    executor.behaviour = lambda heard, reply, answer: frame(reply, answer ^ error)
    session = new_session("local")
    xq = ring_rows(session.preparation)
    with pytest.raises(errors.VerificationError):
        session.product(QKV, FORWARD, xq)
    before = len(executor.heard)
    for index in (QKV, OUT):
        with pytest.raises(errors.SymbiosisError):
            session.product(index, FORWARD, xq)
    session.close()
    assert (len(executor.heard), len(executor.hellos)) == (before, 1)


# Rule 7. Replies are bound to their requests; the comparison is exact.


def stranger(**fields: Any) -> Callable[..., bytes]:
    """Answer honestly, but as the answer to another request."""

    def behave(heard: Heard, reply: wire.Result, answer: Tensor) -> bytes:
        return frame(msgspec.structs.replace(reply, **fields), answer)

    return behave


@pytest.mark.parametrize("masking", ["local", "pad"])
@pytest.mark.parametrize(
    "fields",
    [{"nonce": bytes(16)}, {"group": 5}, {"direction": BACKWARD}, {"rows": 9}, {"arithmetic": "float"}],
    ids=str,
)
def test_rule_7_a_reply_answers_one_request(scripted: Scripted, fields: dict[str, Any], masking: str) -> None:
    """An executor's reply, and (with pads) a helper's."""
    liar = scripted.executor if masking == "local" else scripted.helper
    liar.behaviour = stranger(**fields)
    session = scripted.new_session(masking, pool_memory=0)
    with pytest.raises(REFUSED):
        session.product(QKV, FORWARD, ring_rows(session.preparation))


# Rule 8. Executor and helper are never the same operator, also after a failover.


@pytest.mark.parametrize("failover", [False, True])
def test_rule_8_no_party_gets_seed_and_row(scripted: Scripted, failover: bool) -> None:
    """The second executor, which is asked after the first one lied, has the same operator as the helper."""
    first, second, helper = scripted.new_provider(), scripted.new_provider(), scripted.new_provider()
    if failover:
        first.behaviour = spoil
    else:
        second = first
    executors = [first.peer("executor", operator="Alpha" if failover else "Beta")]
    if failover:
        executors.append(second.peer("executor", operator="Beta"))
    helpers = [helper.peer("helper", operator="Beta")]
    session = scripted.new_session("pad", executors, helpers)
    with pytest.raises(errors.RoleConflictError, match="same operator"):
        session.product(QKV, FORWARD, ring_rows(session.preparation))
    assert not any(provider.hellos for provider in (first, second, helper))


# Rule 9. What stays visible is what the documentation names: layer, direction, row count, order.


def test_rule_9_only_shapes_are_visible(llama: Path, federation: Path, tape: Tape) -> None:
    """Two inputs of one shape do not differ in counts, sizes or order of frames."""
    seen = []
    for ids in (IDS, IDS.masked_fill(IDS % 2 == 0, 95)):
        config = RemoteConfig(federation=federation, wiretap=(tape := type(tape)()))
        base: Any = AutoModelForCausalLM.from_pretrained(llama, quantization_config=config)
        with torch.no_grad():  # rows of zeros: a faulty tenant would skip or repeat them
            base.model.embed_tokens.weight[95] = 0
        model: Any = get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear"))
        train_a_step(model, ids)
        model.generate(input_ids=ids[:, :4], max_new_tokens=3, min_new_tokens=3, do_sample=False)
        backend_of(model).close()
        seen.append([(type(m).__name__, m.group, m.direction, m.rows) for m, _ in tape.executed()])
    assert seen[0] == seen[1]


def test_rule_9_a_bucket_hides_exact_row_counts(scripted: Scripted, store: WeightStore) -> None:
    session = scripted.new_session("pad", row_bucket=16)
    weight = store.group(1).weight.to(torch.int64)
    for count in (1, 15, 16, 17, 40):
        rows = torch.arange(count * weight.shape[1], dtype=torch.int32).view(count, -1) % 97 - 48
        expected = (rows.to(torch.int64) @ weight.t()).to(torch.int32)
        assert torch.equal(session.product(OUT, FORWARD, rows), expected)
    assert [heard.request.rows for heard in scripted.executor.executed] == [16, 16, 16, 32, 48]


# Rule 10. What the tenant asked for is final: a checkpoint folder decides nothing.


def test_rule_10_a_folder_does_not_turn_masking_off(
    llama: Path, executor: ScriptedProvider, federation: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "hostile"
    shutil.copytree(llama, folder)
    config = json.loads((folder / "config.json").read_bytes())
    unmasked = {
        "quant_method": "symbiosis-priv",
        "masking": "none",
        "federation": str(federation),
        "cache": str(tmp_path / "evil"),
    }
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": unmasked}))
    with pytest.raises(errors.CheckpointError, match="does not decide"):
        AutoModelForCausalLM.from_pretrained(folder, quantization_config=RemoteConfig(federation=federation))
    assert executor.heard == []


# Rule 11. Parties are pairwise distinct, and a seed is bound to its holder's entry and key.


def masks_are_even(session: Session, executor: ScriptedProvider) -> bool:
    """Returns True if the lowest bit of all words that an executor gets is the row's own bit."""
    xq = ring_rows(session.preparation)
    session.product(QKV, FORWARD, xq)
    rows = executor.executed[-1].rows
    assert rows is not None
    return not bool(((rows - xq) & 1).any())


def test_rule_11_two_helpers_never_expand_one_stream(scripted: Scripted, monkeypatch: Patch) -> None:
    """Even if the check of distinct parties is removed: two entries have two seeds."""
    twins = [scripted.helper.peer("helper", name=name) for name in ("one", "other")]
    refused = scripted.new_session("pad", helpers=twins)
    with pytest.raises(
        errors.ConfigError, match=r"helper 'one' and helper 'other' have the same certificate, public key"
    ):
        masks_are_even(refused, scripted.executor)
    assert scripted.executor.heard == scripted.helper.heard == []
    monkeypatch.setattr("tenant.core.masked.check_parties", lambda peers, **_: None)
    assert not masks_are_even(scripted.new_session("pad", helpers=twins), scripted.executor)


def test_rule_11_a_quarantined_executor_is_not_asked_under_another_name(scripted: Scripted, monkeypatch: Patch) -> None:
    scripted.executor.behaviour = spoil
    twins = [scripted.executor.peer("executor", name=name) for name in ("one", "other")]

    def asked() -> int:
        session = scripted.new_session("local", twins)
        with pytest.raises((errors.ConfigError, errors.VerificationError)):
            session.product(QKV, FORWARD, ring_rows(session.preparation))
        return len(scripted.executor.executed)

    assert asked() == 0
    monkeypatch.setattr("tenant.core.masked.check_parties", lambda peers, **_: None)
    assert asked() == 1


# Rule 12. A secret lives in one process: forks are noticed by Python's fork hook and by another process id.


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.usefixtures("sockets")
def test_rule_12_a_fork_with_the_same_process_id_is_detected(
    executor: ScriptedProvider, helper: ScriptedProvider, monkeypatch: Patch, session: Session
) -> None:
    """The child has its parent's process id, as in a new pid namespace; a thread of the parent computes a product."""
    monkeypatch.setattr("os.getpid", functools.partial(int, os.getpid()))
    session.product(QKV, FORWARD, xq := ring_rows(session.preparation))
    busy, done = threading.Event(), threading.Event()

    def hold_up_the_other_layer(heard: Heard, reply: wire.Result, answer: Tensor) -> bytes:
        if heard.request.group == OUT:
            busy.set()
            done.wait(20)
        return frame(reply, answer)

    executor.behaviour = hold_up_the_other_layer
    thread = threading.Thread(target=lambda: session.product(OUT, FORWARD, ring_rows(session.preparation, OUT)))
    thread.start()
    assert busy.wait(20)
    in_child = in_a_fork(lambda: session.product(QKV, FORWARD, xq).numpy().tobytes())
    done.set()
    thread.join()
    opened = len(executor.hellos)
    assert in_child == session.product(QKV, FORWARD, xq).numpy().tobytes()
    assert len(executor.hellos) == opened  # the child did not touch its parent's connections
    assert repeats(masks_of(executor.executed, xq)) == 0
    assert len({h.request.seed for h in helper.effects if isinstance(h.request, wire.Effect)}) == 2


@pytest.mark.usefixtures("sockets")
def test_rule_12_a_fork_by_c_code_is_detected(scripted: Scripted) -> None:
    """libc's fork does not run Python's hook. The child uses none of its parent's pads or connections."""
    session = scripted.new_session("pad", pool_memory=1 << 20)
    session.product(QKV, FORWARD, xq := ring_rows(session.preparation))
    until(lambda: session.ledger().pads_ready)

    def product() -> bytes:
        return session.product(QKV, FORWARD, xq).numpy().tobytes()

    # libc's fork copies a lock of the interpreter that another thread holds at that moment. Such a child never answers.
    for _ in range(3):
        in_child = in_a_fork(product, fork=ctypes.PyDLL(None).fork, wait_s=20)
        if in_child != NO_ANSWER:
            break
    assert in_child == product()
    assert repeats(masks_of(scripted.executor.executed, xq)) == 0
    assert len({h.request.seed for h in scripted.helper.effects if isinstance(h.request, wire.Effect)}) >= 2


@pytest.fixture
def hinted(store: WeightStore, tmp_path: Path) -> tuple[Preparation, Preparation]:
    """Two tenants' preparations of one model, with hints."""
    made = [prepare(store, digest=store.manifest().digest, cache=tmp_path / name) for name in "ab"]
    for preparation in made:
        make_hints(preparation, store, bits=16)
    return made[0], made[1]


def test_rule_13_hints_are_the_tenants_own(
    hinted: tuple[Preparation, Preparation], new_session: Callable[..., Session], executor: ScriptedProvider
) -> None:
    """No row leaves of a tenant whose hint was replaced by that of another tenant, for another P."""
    own, other = hinted
    assert own.folder is not None
    assert other.folder is not None
    shutil.copy(other.folder / "lwe-16" / f"{QKV}.forward", own.folder / "lwe-16")
    session = new_session("lwe", prepared=own)
    with pytest.raises(errors.SymbiosisError):
        session.product(QKV, FORWARD, ring_rows(own) // 2)
    assert executor.executed == []


def test_rule_13_nothing_of_c_or_e_outlives_its_row(
    hinted: tuple[Preparation, Preparation], new_session: Callable[..., Session], monkeypatch: Patch
) -> None:
    drawn: list[weakref.ref[LweRows]] = []
    make = LweRows.__init__

    def watched(rows: LweRows, *arguments: Any) -> None:
        drawn.append(weakref.ref(rows))
        make(rows, *arguments)

    monkeypatch.setattr(LweRows, "__init__", watched)
    session = new_session("lwe", prepared=hinted[0], pool_memory=0)
    for _ in range(3):
        session.product(QKV, FORWARD, ring_rows(hinted[0], count=1) // 2)
        session.product(QKV, FORWARD, ring_rows(hinted[0]) // 2)
    gc.collect()
    assert len(drawn) == 6
    assert [rows for rows in drawn if rows() is not None] == []
