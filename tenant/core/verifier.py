"""Freivalds' check over the integers: a row is used only if it is the product of the pinned weights.

For a secret column R of residues modulo p = 2^61 - 1 the tenant keeps `V = W.T @ R` mod p. After the effects are
subtracted, a row y is read as signed integers and accepted if and only if `y @ R == xq @ V` mod p. Both sides are inner
products with R: of y, and of the true product t, whose entries are in the range of int32 (`ring`). If y is not t, then
y - t is a non-zero vector with entries of at most 2^32 < p, and R maps it to 0 with probability at most 2^-60
(`modular.uniform`). This holds for every error, for every 2-adic valuation, and also for errors that wrap around,
because 2^32 is not a multiple of p. The check needs no bit of the range, one column is enough, and answers and effects
are checked together.

The verdict is "y is t", up to that probability. It depends on errors alone, never on the rows. One of q wrong answers
of a provider passes with probability at most q * 2^-60, because a refusal reveals nothing about R except that this
error was detected.

Stacks of experts. A row for expert k is checked with R and `V_k = W_k.T @ R`: one R is shared by all experts of the
stack (one per width and direction), and only V differs. That is as sound as an R for each expert: what a check refuses
is the error y - t, and for every non-zero error a uniform R passes it with probability at most 2^-60, whichever matrix
t came from. The verdicts of q lies, in whatever order, at whatever experts and however they were chosen, are all
"refused" except with probability q * 2^-60 by the union bound: as long as every lie was refused, the provider has
learned nothing that depends on R, so its next error is independent of R. A dense product of the stack has errors
(e_1 ... e_E), one part per expert, and is checked with the columns a_k R, a_k secret and uniform, and V = sum a_k V_k:
`sum a_k (e_k @ R)` is 0 only if every e_k @ R is (2^-60, for one e_k that is not 0) or if some a_k has the one residue
that cancels the rest (2^-60), so with 2^-59 at most. In the other direction the experts' rows are joined, W R holds
every V_k already, and one column serves both.

`BlameKeys` attribute the fault after a row was refused: if y = y' - sum e_j is wrong, the answer y' or an effect e_j is
wrong modulo 2^32. Each of them is checked separately with m secret columns over Z_2^32. An error of 2-adic valuation v
passes m uniform columns with probability 2^-(32-v)m. For v >= 30 that is not negligible, so it can happen that no
provider is convicted. Then all providers that took part are suspects. No wrong result is used in that case either. All
of R is secret and uniform: small or sparse columns could be learned by probing. The V of a stack of experts are not
stored, because m columns for each of thousands of experts would be half of the preparation. They are computed from the
checkpoint when a row was refused. Without the checkpoint, all providers that took part are suspects.

Narrow rings. Of answers and effects only residues modulo 2^w travel. An honest party's residues satisfy the equation of
the blame keys modulo 2^w, because reduction modulo 2^w is a ring homomorphism of Z_2^32: an honest party is never
convicted. An error of valuation v < w passes m columns with probability 2^-(w-v)m, as above with w in place of 32.
Products may leave a narrow ring, so a row that fails the check does not prove a lie: its wraps are corrected
(`symbiosis_priv.arithmetic.wraps`). If they cannot be, and the blame keys find no error, nobody is suspected. The row
is multiplied again at half its scale. A liar whose error has v = w - 1 causes that too, with probability 2^-m, and has
gained nothing: its answer is not used. At the smallest scale no product leaves the ring, and the rules above hold.
A second, independent set of verification keys (`Preparation.second`) confirms corrections.
"""

import functools
import hmac
import itertools
import secrets
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final, Self

import msgspec
import torch
from safetensors import safe_open
from torch import Tensor

from symbiosis_priv.arithmetic.keystream import SEED_BYTES, StreamKey, derive, expand
from symbiosis_priv.arithmetic.modular import PRIME, Column, multiply, uniform, weigh
from symbiosis_priv.arithmetic.ring import BACKWARD, DIRECTIONS, FORWARD, Direction
from symbiosis_priv.arithmetic.segments import Counts, segments
from symbiosis_priv.errors import CheckpointError
from symbiosis_priv.kernels import RingMatrix
from symbiosis_priv.limits import DEFAULT_RING_BITS, RingBits

DEFAULT_COLUMNS = 16
_SECRET = "secret"
_BLOCK = 1 << 19  # weights per block, which stay in the cache


Stacks = Mapping[int, Callable[[], RingMatrix]]
"""Functions that read a stack of experts from the checkpoint, by group index."""
NO_STACKS: Final[Stacks] = {}


class VerificationKeys:
    """R and V modulo p for every (layer group, direction). Secret: never sent, never logged; on disk with mode 0600."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        self._products: dict[tuple[int, Direction], Column] = {}
        self._experts: dict[tuple[int, Direction], Tensor] = {}  # V of every expert, int64 `[experts, w]`
        self._columns: dict[tuple[int, Direction, bool], Column] = {}

    @classmethod
    def fresh(cls) -> Self:
        """New keys from the operating system's generator."""
        return cls(secrets.token_bytes(SEED_BYTES))

    def add(self, index: int, weight: Tensor) -> None:
        """Make the keys of one layer group from its quantised weight, int16 `[o, d]`."""
        outputs, inputs = weight.shape
        forward, backward = self._column(index, FORWARD, outputs), self._column(index, BACKWARD, inputs)
        to_inputs, to_outputs = weigh(weight, forward, backward)
        self._products[index, FORWARD], self._products[index, BACKWARD] = Column(to_inputs), Column(to_outputs)

    def add_stack(self, index: int, weight: Tensor, *, experts: int, turned: bool) -> None:
        """Make the keys of a stack from its dense quantised weight, int16 `[o, d]`; `turned` as in the manifest."""
        if turned:
            weight = weight.t().contiguous()
        # results have the width of one expert, rows have the width of the stack
        across: Direction = BACKWARD if turned else FORWARD
        along = _other(across)
        height, width = len(weight) // experts, weight.shape[1]
        shared, other = self._column(index, across, height), self._column(index, along, width)
        down, up = zip(*[weigh(matrix, shared, other) for matrix in weight.split(height)], strict=True)
        self._experts[index, across] = torch.stack(down)
        self._products[index, along] = Column(torch.cat(up))

    def columns(self, index: int, direction: Direction) -> tuple[Column, Column]:
        """Return (R, V). A row y of a product is accepted for a row x of a request if `y @ R == x @ V` modulo p."""
        column = self._columns.get((index, direction, False))
        if column is None:
            column = self._shared(index, direction)
            if (table := self._experts.get((index, direction))) is not None:
                key = derive(self._secret, "check experts", str(index), direction)
                factors = uniform(StreamKey(key), len(table)).values[:, None]
                column = Column(multiply(factors, column.values).reshape(-1))
                joined = functools.reduce(lambda a, b: (a + b).remainder(PRIME), multiply(factors, table))
                self._products[index, direction] = Column(joined)
            self._columns[index, direction, False] = column
        return column, self._products[index, direction]

    def expert_columns(self, index: int, direction: Direction) -> tuple[Column, Sequence[Column]]:
        """R, and V of every expert of a stack, for rows that each belong to one expert."""
        table = self._experts.get((index, direction))
        if table is None:
            table = self._products[index, direction].values.view(len(self._experts[index, _other(direction)]), -1)
        column = self._columns.get((index, direction, True))
        if column is None:
            column = self._columns[index, direction, True] = self._shared(index, direction)
        return column, [Column(values) for values in table]

    def for_rows(
        self, index: int, direction: Direction, counts: Counts | None
    ) -> tuple[Column, Column | Sequence[Column]]:
        """`expert_columns` for rows that each belong to one expert of a stack, `columns` for others."""
        return self.columns(index, direction) if counts is None else self.expert_columns(index, direction)

    def _shared(self, index: int, direction: Direction) -> Column:
        """R for results of one matrix: of a linear, or of every expert of a stack."""
        other, table = _other(direction), self._experts.get((index, direction))
        if (index, other) in self._experts:
            height = self._experts[index, other].shape[1]
        else:
            height = len(self._products[index, other]) // (1 if table is None else len(table))
        return self._column(index, direction, height)

    def mac(self, purpose: str, *parts: str) -> bytes:
        """32 bytes that only the holder of these keys can compute. They authenticate files beside the keys."""
        key = derive(self._secret, "mac", purpose)
        return hmac.digest(key, msgspec.json.encode(parts), "sha256")

    def to_tensors(self) -> dict[str, Tensor]:
        """The keys as tensors for safetensors, on the tenant's own disk."""
        products = {place: v.values for place, v in self._products.items()} | self._experts
        return {_SECRET: _as_tensor(self._secret), **{_name(*place): values for place, values in products.items()}}

    @classmethod
    def from_tensors(cls, tensors: dict[str, Tensor], *, groups: int) -> Self:
        """Read the result of `to_tensors` for `groups` layer groups. Raises `KeyError` if tensors are missing."""
        keys = cls(_as_secret(tensors[_SECRET]))
        for index, direction in itertools.product(range(groups), DIRECTIONS):
            values = tensors[_name(index, direction)]
            if values.dim() == 2:
                keys._experts[index, direction] = values
            else:
                keys._products[index, direction] = Column(values)
        return keys

    def __repr__(self) -> str:
        return f"VerificationKeys({len(self._products | self._experts)} products)"

    def _column(self, index: int, direction: Direction, height: int) -> Column:
        return uniform(StreamKey(derive(self._secret, "check", str(index), direction)), height)


class BlameKeys:
    """R and V modulo 2^32 for every (layer group, direction), with m columns. They attribute faults.

    The keys are on disk with mode 0600. `open` reads each key when it is needed. An open file stays readable after it
    is deleted.

    Args:
        stacks: the model's stacks of experts; their V are never stored.
    """

    def __init__(
        self,
        secret: bytes,
        *,
        columns: int,
        stored: Callable[[str], Tensor] | None = None,
        stacks: Stacks = NO_STACKS,
    ) -> None:
        self._secret = secret
        self._columns = columns
        self._stacks = stacks
        self._made: dict[str, Tensor] = {}
        self._stored = stored or self._made.__getitem__

    @classmethod
    def fresh(cls, *, columns: int, stacks: Stacks = NO_STACKS) -> Self:
        """New keys from the operating system's generator."""
        return cls(secrets.token_bytes(SEED_BYTES), columns=columns, stacks=stacks)

    @classmethod
    def open(cls, path: Path, *, columns: int, groups: int, stacks: Stacks = NO_STACKS) -> Self:
        """Open the keys of `groups` layer groups, in a file that holds the result of `to_tensors`.

        Raises:
            CheckpointError: keys are missing.
        """
        file = safe_open(path, framework="pt", device="cpu")
        linears = (index for index in range(groups) if index not in stacks)
        wanted = {_SECRET, *(_name(index, direction) for index in linears for direction in DIRECTIONS)}
        if missing := wanted - set(file.keys()):
            raise CheckpointError(f"{path} lacks {sorted(missing)}; delete it")
        return cls(_as_secret(file.get_tensor(_SECRET)), columns=columns, stored=file.get_tensor, stacks=stacks)

    def add(self, index: int, weight: Tensor, *, weight_bits: int) -> None:
        """Make the keys of one layer group from its quantised weight, int16 `[o, d]`."""
        outputs, inputs = weight.shape
        down = self._expand(index, FORWARD, rows=outputs).t().contiguous()
        up = self._expand(index, BACKWARD, rows=inputs).t().contiguous()
        to_inputs = torch.zeros((self._columns, inputs), dtype=torch.int32, device="cpu")
        to_outputs = torch.empty((outputs, self._columns), dtype=torch.int32, device="cpu")
        step = max(1, _BLOCK // max(1, inputs))
        for start in range(0, outputs, step):  # packing the whole weight would take more memory, and so more time
            part = slice(start, start + step)
            matrix = RingMatrix(weight[part], weight_bits=weight_bits)
            to_inputs += matrix.product(down[:, part], BACKWARD)
            to_outputs[part] = matrix.product(up).t()
        self._made[_name(index, FORWARD)] = to_inputs.t().contiguous()
        self._made[_name(index, BACKWARD)] = to_outputs

    def accepts(
        self,
        index: int,
        direction: Direction,
        *,
        rows: Tensor,
        answer: Tensor,
        counts: Counts | None = None,
        ring_bits: RingBits = DEFAULT_RING_BITS,
    ) -> bool:
        """Returns True if `answer` is the product of `rows` modulo 2^ring_bits.

        Args:
            rows: int32 `[r, d]`, as sent to the executor or as expanded from a seed.
            answer: int32 `[r, o]`, as received.
            counts: rows of every expert, if rows belong to experts of a stack.

        Raises:
            CheckpointError: the stack cannot be read from the checkpoint.
        """
        stack = self._stacks[index]() if index in self._stacks else None
        if stack is None:
            stored = self._stored(_name(index, direction)).t().contiguous()
            widths = stored.shape[1], len(self._stored(_name(index, _other(direction))))
        else:
            widths = stack.columns(direction, by_expert=counts is not None)
        if answer.dtype != torch.int32 or answer.shape != (len(rows), widths[1]) or rows.shape[1] != widths[0]:
            return False
        r = self._expand(index, direction, rows=widths[1]).t().contiguous()
        for expert, segment in [(0, slice(None))] if counts is None else segments(counts):
            alone = None if counts is None else tuple(len(r) * (other == expert) for other in range(len(counts)))
            v = stored if stack is None else stack.product(r, _other(direction), counts=alone)
            # 2 to 3 times as fast as `answer @ r` and `rows @ v`
            difference = r @ answer[segment].t() - v @ rows[segment].t()
            if bool((difference << DEFAULT_RING_BITS - ring_bits).any()):
                return False
        return True

    def to_tensors(self) -> dict[str, Tensor]:
        """The keys as tensors for safetensors, on the tenant's own disk."""
        return {_SECRET: _as_tensor(self._secret), **self._made}

    def __repr__(self) -> str:
        return f"BlameKeys({self._columns} columns)"

    def _expand(self, index: int, direction: Direction, *, rows: int) -> Tensor:
        key = derive(self._secret, "verify", str(index), direction)
        return expand(StreamKey(key), first_row=0, rows=rows, width=self._columns)


def _other(direction: Direction) -> Direction:
    return BACKWARD if direction == FORWARD else FORWARD


def _name(index: int, direction: Direction) -> str:
    return f"{index}.{direction}"


def _as_tensor(secret: bytes) -> Tensor:
    return torch.tensor(list(secret), dtype=torch.uint8, device="cpu")


def _as_secret(tensor: Tensor) -> bytes:
    secret = bytes(tensor.tolist())
    if len(secret) != SEED_BYTES:
        raise CheckpointError("cached verification keys are damaged; delete them")
    return secret
