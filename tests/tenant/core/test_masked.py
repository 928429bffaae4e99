"""The central promise as a type: rows leave only as `MaskedRows`, and only the masking code makes them.

Each promise of `tenant.core` has a planted fault here that a test finds; the others are in `test_rules.py`.
"""

import ast
import copy
import functools
import pickle
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

import tenant
from symbiosis_priv.arithmetic.keystream import Keystream, StreamKey
from symbiosis_priv.arithmetic.ring import FORWARD
from symbiosis_priv.errors import BurntRowError, QuarantinedError, RoleConflictError
from symbiosis_priv.federation import Peer
from symbiosis_priv.limits import GroupIndex
from symbiosis_priv.network import wire
from tenant.connections.channel import fresh_nonce
from tenant.core.masked import UNMASKED_BY_CHOICE, Gate, MaskedRows, Quarantine, cut, mask, remask
from tenant.core.pads import Pad, Share
from tenant.core.parts import Part
from tenant.routing.routes import Routes
from tenant.worker import Promise
from tests.tenant.conftest import NewFederation, NewProvider, NewSession, Scripted
from tests.tenant.scripted import ScriptedProvider

Patch = pytest.MonkeyPatch
WIDTH = 5
ROOT = Path(tenant.__file__).parents[1]
MAY_SEND = {"tenant/connections/channel.py"}
"""The tenant's module that holds connections to providers."""
MAY_LEAVE_ROWS_UNMASKED = {
    "tenant/masking/registry.py": "the tenant's choice",
    "tenant/masking/paper_pool.py": "the tenant's choice",
    "tenant/session/supply.py": "passes on what the scheme has said",
    "tenant/federation/probe.py": "random rows",
    "tenant/bench/many_tenants.py": "random rows",
}
"""The tenant's modules that use `UNMASKED_BY_CHOICE`, and their reasons."""


def pad_of(rows: int, *, first_row: int = 0, holder: Peer | None = None, key: bytes = bytes(32)) -> Pad:
    return Pad(rows, (Share(holder, Keystream(StreamKey(key), width=WIDTH), first_row, Promise()),))


def zeros(rows: int) -> Tensor:
    return torch.zeros(rows, WIDTH, dtype=torch.int32)


# A raw tensor cannot leave.


def test_a_connection_refuses_a_raw_tensor(executor: ScriptedProvider, new_session: NewSession) -> None:
    """mypy refuses the call as well: if it did not, the `type: ignore` would be an error."""
    session = new_session("none")
    session.product(GroupIndex(1), FORWARD, torch.zeros(1, 64, dtype=torch.int32))
    ((channel,),) = (executor.channels for executor in session.runtime.executors.values())
    request = wire.Execute(nonce=fresh_nonce(), group=1, direction=FORWARD, arithmetic="ring", rows=1)
    tensor = torch.zeros(1, 64, dtype=torch.int32)
    before = len(executor.heard)
    with pytest.raises(TypeError, match="MaskedRows"):
        channel.request(request, tensor, outputs=64)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="MaskedRows"):
        channel.attempt(request, tensor, outputs=64, deadline=1e12)  # type: ignore[arg-type]
    assert len(executor.heard) == before


def test_a_tensor_handed_past_the_masking_code_is_found(scripted: Scripted, monkeypatch: Patch) -> None:
    """Planted: a part that sends its encoded rows. Nothing reaches the executor."""

    def forget_to_mask(self: Part) -> None:
        self.sent = self.encoded  # type: ignore[assignment]

    session = scripted.new_session("local")
    monkeypatch.setattr(Part, "mask", forget_to_mask)
    with pytest.raises((TypeError, AttributeError)):
        session.product(GroupIndex(1), FORWARD, torch.zeros(1, 64, dtype=torch.int32))
    assert scripted.executor.executed == []

    class Tensors(Tensor):  # the same, with all attributes of rows that later code uses
        holders = pads = ()

        @property
        def masked_words(self) -> Tensor:
            return self.as_subclass(Tensor)

    def disguise(self: Part) -> None:
        self.sent = self.encoded.as_subclass(Tensors)  # type: ignore[assignment]

    monkeypatch.setattr(Part, "mask", disguise)
    rows = torch.arange(64, dtype=torch.int32).view(1, 64)
    with pytest.raises(TypeError, match="MaskedRows"):
        session.product(GroupIndex(1), FORWARD, rows)
    assert scripted.executor.executed == []
    monkeypatch.setattr("tenant.connections.channel.MaskedRows", Tensors)  # without the check it would be sent
    monkeypatch.setattr(Part, "open", lambda self, answer, **_: [])
    session.product(GroupIndex(1), FORWARD, rows)
    assert torch.equal(scripted.executor.executed[0].rows, rows)


@pytest.mark.parametrize(
    "make",
    [
        lambda rows: MaskedRows(object(), rows, ()),
        lambda rows: MaskedRows(None, rows, UNMASKED_BY_CHOICE),
        lambda rows: copy.copy(mask(rows, UNMASKED_BY_CHOICE)),
        lambda rows: copy.deepcopy(mask(rows, UNMASKED_BY_CHOICE)),
        lambda rows: pickle.loads(pickle.dumps(mask(rows, UNMASKED_BY_CHOICE))),
    ],
    ids=["token", "no token", "copy", "deepcopy", "pickle"],
)
def test_nothing_else_makes_masked_rows(make: Callable[[Tensor], MaskedRows]) -> None:
    with pytest.raises(TypeError):
        make(zeros(2))


@pytest.mark.parametrize("carry", [copy.deepcopy, pickle.dumps, lambda pad: pickle.dumps(pad.shares[0].keystream)])
def test_a_pad_and_its_keystream_are_neither_copied_nor_stored(carry: Callable[[Pad], object]) -> None:
    """A copy could mask other rows with the same pad. A shallow copy shares the mark of use with its original."""
    pad = pad_of(2)
    with pytest.raises(TypeError):
        carry(pad)
    copy.copy(pad).add_mask(zeros(2))
    with pytest.raises(BurntRowError):
        pad.add_mask(zeros(2))


@pytest.mark.parametrize("name", ["masked_words", "pads", "holders", "other"])
def test_masked_rows_are_frozen(name: str) -> None:
    rows = mask(zeros(2), UNMASKED_BY_CHOICE)
    with pytest.raises(AttributeError):
        setattr(rows, name, zeros(2))
    with pytest.raises(AttributeError):
        delattr(rows, name)
    assert "0" not in repr(rows).replace("[2, 5]", "")


@functools.cache
def modules() -> dict[str, ast.Module]:
    """Every module of the tenant, by path."""
    paths = sorted((ROOT / "tenant").rglob("*.py"))
    return {str(path.relative_to(ROOT)): ast.parse(path.read_text(encoding="utf-8")) for path in paths}


def breaches(name: str, tree: ast.Module) -> set[str]:
    """Actions of a module that only the masking code, a connection, or a listed module may do."""
    found = set()
    core = name.startswith("tenant/core/")
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom | ast.Import):
            imported = {alias.name for alias in node.names} | {str(getattr(node, "module", ""))}
            if (
                "ClientConnection" in imported
                and str(getattr(node, "module", "")).endswith("dial")
                and name not in MAY_SEND
            ):
                found.add("opens a connection")
            if "UNMASKED_BY_CHOICE" in imported and not core and name not in MAY_LEAVE_ROWS_UNMASKED:
                found.add("leaves rows unmasked")
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") in {"MaskedRows", "UnmaskedByChoice"}:
            found |= set() if name == "tenant/core/masked.py" else {"makes masked rows"}
        if isinstance(node, ast.Attribute | ast.Name):
            used = node.attr if isinstance(node, ast.Attribute) else node.id
            if used == "_MAKER" and name != "tenant/core/masked.py":
                found.add("uses the token")
            if used in {"add_mask", "subtract_mask"} and not core:
                found.add("masks rows itself")
            if used == "masked_words" and not core and name not in MAY_SEND:
                found.add("reads the words of masked rows")
    return found


def test_no_other_code_can_hand_a_tensor_to_a_connection() -> None:
    assert {name: found for name, tree in modules().items() if (found := breaches(name, tree))} == {}


@pytest.mark.parametrize(
    ("planted", "expected"),
    [
        ("from symbiosis_priv.network.dial import ClientConnection", "opens a connection"),
        ("from tenant.core.masked import UNMASKED_BY_CHOICE", "leaves rows unmasked"),
        ("sent = MaskedRows(token, rows, ())", "makes masked rows"),
        ("token = masked._MAKER", "uses the token"),
        ("pad.add_mask(rows)", "masks rows itself"),
        ("line.send(message, part.sent.masked_words)", "reads the words of masked rows"),
    ],
)
def test_code_that_goes_past_the_masking_is_found(planted: str, expected: str) -> None:
    assert breaches("tenant/session/planted.py", ast.parse(planted)) == {expected}


def test_the_list_of_exceptions_is_up_to_date() -> None:
    naming = {
        name
        for name, tree in modules().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and any(a.name == "UNMASKED_BY_CHOICE" for a in node.names)
    }
    assert naming == set(MAY_LEAVE_ROWS_UNMASKED)


# A pad masks once, and pads cover every row.


@given(sizes=st.lists(st.integers(1, 7), min_size=1, max_size=5), cuts=st.lists(st.integers(1, 9), max_size=5))
def test_every_row_gets_a_mask_row_of_its_own(sizes: list[int], cuts: list[int]) -> None:
    starts = [sum(sizes[:number]) for number in range(len(sizes))]
    pads: Sequence[Pad] = [pad_of(size, first_row=start) for size, start in zip(sizes, starts, strict=True)]
    masks = []
    for size in [*cuts, sum(sizes)]:
        head, pads = cut(pads, size)
        masks.append(mask(zeros(sum(pad.rows for pad in head)), head).masked_words)
    assert torch.equal(torch.cat(masks), Keystream(StreamKey(bytes(32)), width=WIDTH).expand(0, sum(sizes)))


def test_a_pad_used_twice_is_an_error(monkeypatch: Patch) -> None:
    pad = pad_of(3)
    mask(zeros(3), [pad])
    again = zeros(3)
    with pytest.raises(BurntRowError, match="twice"):
        mask(again, [pad])
    with pytest.raises(BurntRowError, match="twice"):
        pad.split(1)
    whole = pad_of(3)
    first, second = whole.split(1)
    with pytest.raises(BurntRowError, match="twice"):
        mask(zeros(3), [whole])
    mask(zeros(3), [first, second])
    assert torch.equal(again, zeros(3))
    added = pad_of(3)  # compiled code has added the masks
    mask(zeros(3), [added], added=True)
    for other in (True, False):
        with pytest.raises(BurntRowError, match="twice"):
            mask(zeros(3), [added], added=other)
    monkeypatch.setattr(Pad, "_use", lambda self: None)  # planted: uses are not counted
    assert torch.equal(mask(zeros(3), [pad]).masked_words, mask(zeros(3), [pad]).masked_words)


@pytest.mark.parametrize("covered", [0, 2, 4])
def test_pads_that_do_not_cover_the_rows_are_an_error(covered: int) -> None:
    """An empty list of pads is an error too: it may be an accident, and is not the tenant's choice of no masking."""
    with pytest.raises((BurntRowError, ValueError)):
        mask(zeros(3), [pad_of(covered)] if covered else [])
    with pytest.raises(BurntRowError):
        Pad(3, ())


def test_replaced_pads_are_not_used_again() -> None:
    old, kept, new = pad_of(2), pad_of(1, first_row=2), pad_of(2, key=bytes([1]) * 32)
    rows = torch.arange(3 * WIDTH, dtype=torch.int32).view(3, WIDTH)
    sent = mask(rows.clone(), [old, kept])
    words = sent.masked_words.clone()
    other = remask(sent, {0: new})
    assert torch.equal(sent.masked_words, words)  # the rows that were sent do not change
    assert torch.equal(
        other.masked_words[:2], rows[:2] + Keystream(StreamKey(bytes([1]) * 32), width=WIDTH).expand(0, 2)
    )
    assert torch.equal(other.masked_words[2:], words[2:])
    with pytest.raises(BurntRowError):
        remask(other, {1: pad_of(2, first_row=9)})
    with pytest.raises(BurntRowError, match="twice"):
        remask(other, {0: new})


# No company sees a row and a seed of its pad.


@pytest.fixture
def gate_of(new_federation: NewFederation, new_provider: NewProvider) -> Callable[[str], tuple[Gate, Peer, Peer]]:
    def make(operators: str) -> tuple[Gate, Peer, Peer]:
        """A gate, an executor and a helper. Each letter names the operator of one of them."""
        executor = new_provider().peer("executor", operator=operators[0])
        helper = new_provider().peer("helper", operator=operators[1])
        other = new_provider().peer("helper", operator="C")
        federation = new_federation([executor], [helper, other], pad_helpers=1)
        return Gate(federation, federation.helpers, Quarantine()), executor, helper

    return make


def test_the_gate_lets_no_company_see_rows_and_seeds(gate_of: Callable[[str], tuple[Gate, Peer, Peer]]) -> None:
    for operators in ("AB", "AA"):
        gate, executor, helper = gate_of(operators)
        rows = mask(zeros(2), [pad_of(2, holder=helper)])
        gate.check(helper, None)
        if operators == "AB":
            gate.check(executor, rows)
        else:
            with pytest.raises(RoleConflictError):
                gate.check(executor, rows)
        with pytest.raises(RoleConflictError):
            gate.check(helper, rows)
        with pytest.raises(RoleConflictError):  # a helper sees no rows, whoever knows their pads
            gate.check(helper, mask(zeros(2), [pad_of(2)]))
        with pytest.raises(RoleConflictError):
            gate.check(executor, None)
        gate.check(executor, mask(zeros(2), [pad_of(2)]))


def test_the_gate_lets_nothing_pass_to_a_quarantined_provider(scripted: Scripted) -> None:
    executor, helper = scripted.new_provider().peer("executor"), scripted.new_provider().peer("helper")
    federation, quarantined = scripted.new_federation([executor], [helper], pad_helpers=1), Quarantine()
    gate, rows = Gate(federation, federation.helpers, quarantined), mask(zeros(2), [pad_of(2, holder=helper)])
    for peer, request in ((executor, rows), (helper, None)):
        gate.check(peer, request)
        quarantined.add(peer)
        with pytest.raises(QuarantinedError):
            gate.check(peer, request)


@pytest.mark.parametrize("place", range(3))
@pytest.mark.parametrize("pads", [1, 3], ids=["a pad of three shares", "three pads"])
def test_the_gate_looks_at_every_holder(
    gate_of: Callable[[str], tuple[Gate, Peer, Peer]], new_provider: NewProvider, place: int, pads: int
) -> None:
    """One of three holders is of the executor's company: the first one or a later one, of one pad or of another one."""
    gate, executor, own = gate_of("AA")
    holders = [new_provider().peer("helper", operator=operator) for operator in ("E", "F")]

    def masked_under(holders: list[Peer]) -> MaskedRows:
        parts = [pad_of(1, holder=holder) for holder in holders]
        together = [Pad(1, tuple(share for pad in parts for share in pad.shares))]
        return mask(zeros(pads), parts if pads > 1 else together)

    gate.check(executor, masked_under([*holders, holders[0]]))
    with pytest.raises(RoleConflictError):
        gate.check(executor, masked_under([*holders[:place], own, *holders[place:]]))


def test_routing_cannot_overrule_the_gate(scripted: Scripted, monkeypatch: Patch) -> None:
    """Planted: routing ignores rule 8 and chooses an executor of the helper's company. Nothing is sent to it."""
    executor, other, helper, spare = (scripted.new_provider() for _ in range(4))
    session = scripted.new_session(
        "pad",
        [executor.peer("executor", operator="A"), other.peer("executor", operator="D")],
        [helper.peer("helper", operator="A"), spare.peer("helper", operator="C")],
        pad_helpers=1,
    )
    monkeypatch.setattr(Routes, "_admissible", lambda self, executors, holders: list(executors))
    monkeypatch.setattr(Routes, "holders", lambda self, *args, **kwargs: [self.helpers[0]])
    monkeypatch.setattr(Routes, "_best", lambda self, open_ones, *args: next(iter(open_ones), None))
    with pytest.raises(RoleConflictError):
        session.product(GroupIndex(1), FORWARD, torch.zeros(1, 64, dtype=torch.int32))
    assert executor.executed == other.executed == []


# No answer is used unchecked.
