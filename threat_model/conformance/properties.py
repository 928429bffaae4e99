"""The properties by name. Each check tests its own claim only."""

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from symbiosis_priv.arithmetic.keystream import SEED_BYTES, Seed
from symbiosis_priv.arithmetic.ring import DIRECTIONS, FORWARD, Direction
from symbiosis_priv.checkpoints.layers import spans
from symbiosis_priv.harness import strategies as testing
from symbiosis_priv.network import wire
from threat_model.conformance.connections import check_batching, check_refusals
from threat_model.conformance.oracle import Difference
from threat_model.conformance.subject import Case, NotTested, Subject, Violation, describe, effect_case
from threat_model.conformance.trials import EXECUTOR, HELPER, Property, Run, arithmetics, claim, requests

_BLOCK = 32
_UNIFORM_ROWS = 4


@claim(
    "every-layer",
    "Every served layer group has exactly the checkpoint's weights, in both directions and every arithmetic.",
)
def check_every_layer(subject: Subject, run: Run) -> None:
    """Requests every served (layer group, direction, arithmetic) with rows whose product reveals an altered weight.

    Ring. Let the served matrix differ from the pinned one by D != 0. The answer to x is right only if `x @ D.T == 0`
    modulo 2^32. All entries of the first row are odd, so they are units of the ring. If one weight of a channel is
    altered, the answer differs by `x_i * D[o, i]`, which is not 0: the check finds a single altered weight with
    certainty. (A sparse row detects it only with a non-zero entry there. A uniform row misses a change by 2^v with
    probability 2^-(32-v).) Several altered weights of a channel could cancel in the first row, so two uniform rows
    follow. Both uniform rows miss a channel of smallest 2-adic valuation v with probability 2^-2(32-v), at most 2^-42
    because |D| < 2^12. A helper multiplies rows that it expands from a seed, so it gets four uniform rows, which miss
    with probability 2^-84 at most.

    Floats. Rounding hides small changes in long sums. So row j is +-1 on its own block of 32 columns, and zero
    elsewhere. Adding zeros is exact, so the error bound of channel o is at most gamma_33 * 32 * max|W[o]|, forward and
    bias-free. A weight altered by one step of 12-bit quantisation (max|W[o]| / 2047) changes the answer by more than
    twice that bound, so it is found with certainty. (Backward, columns mix channels of different sizes, so it may be
    missed.)
    """
    generator = np.random.default_rng(run.seed)
    for index, direction in itertools.product(subject.groups, DIRECTIONS):
        for arithmetic in arithmetics(subject):
            run.one()
            case = _case(subject, index, direction, arithmetic, generator)
            for part in split(case, subject.row_limit(index)):
                difference = subject.judge(part, subject.answer(part))
                if difference is not None:
                    raise _isolated(subject, part, difference)


def split(case: Case, limit: int) -> list[Case]:
    """Divide a case into requests of at most `limit` rows."""
    return [case.piece(start, limit) for start in range(0, len(case.rows), limit)] or [case]


def _case(
    subject: Subject, index: int, direction: Direction, arithmetic: wire.Arithmetic, generator: np.random.Generator
) -> Case:
    if subject.role == "helper":
        seed = Seed(generator.bytes(SEED_BYTES))
        return effect_case(subject.oracle, index, direction, seed=seed, first_row=0, rows=_UNIFORM_ROWS)
    width, _ = subject.oracle.widths(index, direction)
    if arithmetic == "ring":
        rows = generator.integers(-(2**31), 2**31, (3, width), dtype=np.int32)
        rows[0] |= 1
        return Case(index, direction, arithmetic, torch.from_numpy(rows))
    block = torch.arange(width) // _BLOCK
    signs = torch.from_numpy(generator.choice(np.array([-1, 1], dtype=np.float32), width))
    return Case(index, direction, arithmetic, (block == block.unique()[:, None]) * signs)


def _isolated(subject: Subject, case: Case, difference: Difference) -> Violation:
    """Reduce the wrong row to the fewest neighbouring columns that fail, with ones there, by two binary searches."""
    smallest, wrong = case, difference
    if subject.role == "executor":
        row = case.rows[difference.row : difference.row + 1]

        def fails(first: int, last: int, value: Tensor = row) -> bool:
            nonlocal smallest, wrong
            rows = torch.zeros_like(row)
            rows[:, first : last + 1] = value[:, first : last + 1]
            smaller = replace(case, rows=rows)
            found = subject.judge(smaller, subject.answer(smaller))
            if found is not None:
                smallest, wrong = smaller, found
            return found is not None

        width = row.shape[1]
        if fails(0, width - 1):
            last = bisect(lambda n: fails(0, n), width - 1)
            first = last - bisect(lambda n: fails(last - n, last), last)
            fails(first, last, torch.ones_like(row))
    return subject.violation("does not multiply by the checkpoint's weights", smallest, difference=wrong)


def bisect(fails: Callable[[int], bool], high: int) -> int:
    """The smallest n in 0..high with `fails(n)`. Needs a monotone `fails` and `fails(high)`."""
    low = 0
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if fails(middle) else (middle + 1, high)
    return high


_LARGEST_PAYLOAD = 64 << 20
_JUDGED_WORK = 2_000_000_000  # limit of multiplications for checking the largest answer


@claim("digest", "It serves the model of the local checkpoint, and does not pretend to serve another.")
def check_digest(subject: Subject, run: Run) -> None:
    pinned = subject.oracle.manifest.digest
    for digest in (pinned, "sha256:" + "0" * 64):
        run.one()
        with subject.connect() as connection:
            reply = subject.hello(connection, digest)
            health, _ = subject.ask(connection, wire.FetchHealth())
        if isinstance(reply, wire.Failure) and reply.code == wire.ErrorCode.ROLE_REFUSED:
            raise subject.wrong_role(reply)
        if digest == pinned and not (isinstance(reply, wire.Welcome) and reply.model_digest == pinned):
            raise Violation(f"asked for {pinned}, it answers {describe(reply)}")
        if digest != pinned and not isinstance(reply, wire.Failure):
            raise Violation(f"to a hello for an unknown model, it answers {describe(reply)}")
        if isinstance(health, wire.HealthReport) and health.model_digest != pinned:
            raise Violation(f"its health report names {health.model_digest}, not {pinned}")


@claim(
    "layers", "It serves the layers that the federation file expects, and refuses those that it says it does not serve."
)
def check_layers(subject: Subject, run: Run) -> None:
    layers, served = subject.oracle.manifest.layers, subject.groups
    run.one()
    if subject.welcome.end_group > len(layers):
        raise Violation(f"it says that it serves {subject.welcome.end_group} layer groups or more of {len(layers)}")
    if (wanted := subject.peer.layers) is not None and set(wanted.groups(layers)) - set(served):
        found = ", ".join(map(str, spans(layers[index] for index in served)))
        raise Violation(f"it serves layers {found}, and the federation file expects {wanted}")
    for index in (served.start - 1, served.stop):
        if 0 <= index < len(layers):
            run.one()
            case = effect_case(subject.oracle, index, FORWARD, seed=Seed(bytes(SEED_BYTES)), first_row=0, rows=1)
            reply, _ = subject.exchange(case, case.header(subject.role))
            if not (isinstance(reply, wire.Failure) and reply.code == wire.ErrorCode.NOT_SERVED):
                raise subject.violation(f"answers {describe(reply)} for a layer that it says it does not serve", case)


def _right(subject: Subject, case: Case) -> None:
    difference = subject.judge(case, subject.answer(case))
    if difference is not None:
        raise subject.violation("gives a wrong answer", case, difference=difference)


def each(
    name: str, text: str, roles: tuple[wire.Role, ...] = EXECUTOR + HELPER, *, floats: bool = False, **which: Any
) -> Callable[[Callable[[Subject, Case], None]], Property]:
    """Make a check of one request a property of all `requests`, of `which` kind. Other arguments: as for `claim`."""
    return lambda check: claim(name, text, roles, floats=floats)(
        lambda subject, run: run.for_all(requests(subject, **which), lambda case: check(subject, case))
    )


@claim("experts", "Rows for single experts are multiplied by their own expert's matrix, in both directions.")
def check_experts(subject: Subject, run: Run) -> None:
    stacks = [index for index in subject.groups if subject.oracle.entry(index).experts > 1]
    if not stacks:
        raise NotTested("no layer group is a stack of experts")
    run.for_all(requests(subject, among=stacks, by_expert=True), lambda case: _right(subject, case))


@each("narrow-ring", "In a ring of 24 bits, rows and answers are the low bits of the rows and of their product.")
def check_narrow_ring(subject: Subject, case: Case) -> None:
    _right(subject, case)
    low = subject.answer(case) << 8 >> 8
    narrow = subject.answer(replace(case, ring_bits=24))
    subject.expect_equal(narrow, low, "gives other low bits in a ring of 24 bits", case)


@claim("row-counts", "Requests of no row, one row, an odd number and the largest number of rows are answered exactly.")
def check_row_counts(subject: Subject, run: Run) -> None:
    """Requests the cheapest layer group with increasing row counts, up to 64 MiB. Of many rows, a sample is checked. If
    a row count fails, bisection finds the smallest that fails."""
    oracle = subject.oracle
    index = min(subject.sampled, key=lambda i: oracle.entry(i).inputs * oracle.entry(i).stacked_outputs)
    width, other = oracle.widths(index, FORWARD)
    most = max(1, min(subject.row_limit(index), _LARGEST_PAYLOAD // wire.RING32.size(1, max(width, other))))
    generator = np.random.default_rng(run.seed)
    seed = Seed(generator.bytes(SEED_BYTES))
    rows = torch.from_numpy(generator.integers(-(2**31), 2**31, (most, width), dtype=np.int32))
    found: Violation | None = None

    def fails(count: int) -> bool:
        nonlocal found
        case = Case(index, FORWARD, "ring", rows[:count])
        if subject.role == "helper":
            case = effect_case(oracle, index, FORWARD, seed=seed, first_row=0, rows=count)
        answer = subject.answer(case)
        judged = min(count, max(16, _JUDGED_WORK // (width * other)))
        picks = torch.from_numpy(np.linspace(0, count - 1, judged).astype(np.int64))
        difference = subject.judge(replace(case, rows=case.rows[picks]), answer[picks])
        if difference is not None:
            difference = replace(difference, row=int(picks[difference.row]))
            what = f"gives a wrong answer to {count} row{'s' * (count != 1)}"
            found = subject.violation(what, case, difference=difference)
        return difference is not None

    for count in sorted({min(n, most) for n in (*testing.ROW_COUNTS, most)}):
        run.one()
        if fails(count):
            bisect(fails, count)
            assert found is not None  # the last failing count is the least
            raise found


@each("binding", "A reply repeats what it answers: nonce, group, direction, arithmetic, rows, counts.")
def check_binding(subject: Subject, case: Case) -> None:
    header = case.header(subject.role)
    reply, _ = subject.exchange(case, header)
    if not isinstance(reply, wire.Result):
        raise subject.violation(f"answers with {describe(reply)} where a result belongs", case)
    for name in wire.Binding.__struct_fields__:
        sent, got = getattr(header, name), getattr(reply, name)
        if got != sent:
            got, sent = (value.hex() if isinstance(value, bytes) else value for value in (got, sent))
            raise subject.violation(f"its reply's {name} is {got}, the request's is {sent}", case)


PROPERTIES: tuple[Property, ...] = (
    check_digest,
    check_layers,
    check_every_layer,
    each("ring-exact", "A ring answer is the product modulo 2^32, bit for bit.", EXECUTOR)(_right),
    each("effect-exact", "An effect is the product of the rows that its seed expands to, bit for bit.", HELPER)(_right),
    *(
        each(name, text, EXECUTOR, floats=True, arithmetics=(arithmetic,))(_right)
        for name, text, arithmetic in (
            ("float", "A float answer, bias included, is within its error bound.", "float"),
            ("bias-free", "A bias-free float answer is within its error bound.", "float_bias_free"),
        )
    ),
    check_batching,
    check_experts,
    check_narrow_ring,
    check_row_counts,
    check_binding,
    check_refusals,
)
"""All properties, in the order in which they are tested."""
