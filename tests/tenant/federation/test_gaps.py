"""The gaps of a federation, compared with the definition: an executor for every layer, enough companies for every
pad."""

import itertools
from pathlib import Path

from hypothesis import given, strategies as st

from symbiosis_priv.arithmetic.ring import BACKWARD, DIRECTIONS, FORWARD
from symbiosis_priv.federation import Company, Federation, Peer
from symbiosis_priv.limits import Role
from tenant.federation.probe import Finding, find_gaps

LAYERS = (0, 0, 1, 1, 2, 2)
ALL = range(len(LAYERS))


def peer(name: str, role: Role, operator: str | None = None) -> Peer:
    return Peer(name, operator or f"operator of {name}", role, "host", 1, Path("none.pem"))


def federation(peers: list[Peer], *, companies: tuple[Company, ...] = (), pad_helpers: int | None = None) -> Federation:
    return Federation("sha256:0", 10, Path("t.pem"), Path("t.key"), tuple(peers), companies, pad_helpers)


def serving(who: Peer, forward: range = ALL, backward: range = ALL) -> Finding:
    return Finding(who, groups={FORWARD: forward, BACKWARD: backward})


def test_a_gap_is_named_with_its_direction() -> None:
    one, two = peer("alpha", "executor"), peer("gamma", "executor")
    there = [serving(one, range(2)), serving(two, range(4, 6), range(2, 6))]
    found = find_gaps(federation([one, two]), there, LAYERS)
    assert found == ["layer 1 forward: no executor; list, start or repair an executor that serves them"]
    assert [line.partition(":")[0] for line in find_gaps(federation([one, two]), there[:1], LAYERS)] == [
        "layers 1-2 forward"
    ]
    assert [line.partition(":")[0] for line in find_gaps(federation([one, two]), [], LAYERS)] == [
        "layers 0-2 forward",
        "layers 0-2 backward",
    ]


def test_without_pads_every_helper_is_needed() -> None:
    peers = [peer("alpha", "executor"), peer("beta", "helper"), peer("delta", "helper")]
    there = [serving(peers[0]), serving(peers[1])]
    for line, direction in zip(find_gaps(federation(peers), there, LAYERS), DIRECTIONS, strict=True):
        assert line.startswith(f"executor 'alpha', layers 0-2 {direction}: no pads without helper 'delta'")
        assert "[pads] helpers = 1" in line
    assert find_gaps(federation(peers, pad_helpers=1), there, LAYERS) == []
    no_other = find_gaps(federation(peers[:2]), there[:1], LAYERS)
    assert not any("[pads]" in line for line in no_other)


def test_too_few_companies_are_named_with_their_executor_and_layers() -> None:
    peers = [peer("alpha", "executor", "A"), peer("beta", "helper", "B"), peer("delta", "helper", "A")]
    there = [serving(peers[0]), serving(peers[1], range(4), ALL), serving(peers[2])]
    found = find_gaps(federation(peers, pad_helpers=1), there, LAYERS)
    assert [line.partition(",")[0] for line in found] == ["executor 'alpha'"]
    assert "layer 2 forward: helpers of 0 companies other than its own, but [pads] helpers = 1: start" in found[0]


groups = st.tuples(st.integers(0, len(LAYERS)), st.integers(0, len(LAYERS))).map(lambda pair: range(*sorted(pair)))


@st.composite
def worlds(draw: st.DrawFn) -> tuple[Federation, list[Finding]]:
    operators = st.sampled_from("abcde")
    peers = [peer(f"e{i}", "executor", draw(operators)) for i in range(draw(st.integers(1, 2)))]
    peers += [peer(f"h{i}", "helper", draw(operators)) for i in range(draw(st.integers(1, 3)))]
    names = st.lists(st.sampled_from([p.name for p in peers]), min_size=2, max_size=2, unique=True)
    companies = tuple(Company("x", tuple(draw(names))) for _ in range(draw(st.integers(0, 1))))
    pad_helpers = draw(st.none() | st.integers(1, 3))
    there = [serving(p, draw(groups), draw(groups)) for p in peers if draw(st.integers(0, 9))]
    return federation(peers, companies=companies, pad_helpers=pad_helpers), there


@given(worlds())
def test_a_federation_with_executors_and_helpers_for_all_layers_has_no_gap(
    world: tuple[Federation, list[Finding]],
) -> None:
    known, there = world

    def masked(executor: Peer, helpers: list[Peer]) -> bool:
        if known.pad_helpers is None:
            return set(helpers) == set(known.helpers)
        return any(
            not any(known.one_company(a, b) for a, b in itertools.combinations((executor, *chosen), 2))
            for chosen in itertools.combinations(helpers, known.pad_helpers)
        )

    whole = True
    for direction, group in itertools.product(DIRECTIONS, ALL):
        present = [s.peer for s in there if group in s.groups[direction]]
        executors = [p for p in present if p.role == "executor"]
        helpers = [p for p in present if p.role == "helper"]
        whole &= bool(executors) and all(masked(executor, helpers) for executor in executors)
    assert (find_gaps(known, there, LAYERS) == []) == whole
