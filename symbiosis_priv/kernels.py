"""Exact matrix products modulo 2^32, and the choice between them.

Every kernel computes the same residues, so the choice is only about speed. A kernel is an object prepared
for one weight matrix; `RingMatrix` tests the candidates for exactness once per shape class, times the
survivors and keeps the fastest (DESIGN §2, Kernels).

    int32   torch's integer matmul wraps: exact as it is. CPU only. Good at few rows.
    fp64    exact while every partial sum is an integer below 2^53; wider products are split.
    limbs   int8 tensor cores (CUDA `_int_mm`, CPU VNNI): rows become four balanced int8 limbs, weights one or two;
            limb pairs whose shift reaches 32 vanish.
"""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from symbiosis_priv.errors import ConfigError, RangeError

log = logging.getLogger(__name__)


class Kernel(ABC):
    """A product prepared for one matrix.

    Args:
        weight: int16 `[o, d]`, `|weight| < 2^(weight_bits - 1)`, on the device to compute on.
        weight_bits: b, at most 15.
    """

    name: ClassVar[str]

    @classmethod
    def supports(cls, *, device: torch.device, width: int) -> bool:
        """Whether this kernel can run a product of this input width on this device."""
        return True

    @abstractmethod
    def __init__(self, weight: Tensor, *, weight_bits: int) -> None: ...

    @abstractmethod
    def product(self, rows: Tensor, *, transposed: bool) -> Tensor:
        """`rows @ weight.T` (or `rows @ weight` if transposed) mod 2^32; int32 in, int32 out."""


class Int32Kernel(Kernel):
    name = "int32"

    @classmethod
    def supports(cls, *, device: torch.device, width: int) -> bool:
        return device.type == "cpu"

    def __init__(self, weight: Tensor, *, weight_bits: int) -> None:
        self._weight = weight.to(torch.int32)

    def product(self, rows: Tensor, *, transposed: bool) -> Tensor:
        return rows @ (self._weight if transposed else self._weight.t())


class Float64Kernel(Kernel):
    name = "fp64"

    def __init__(self, weight: Tensor, *, weight_bits: int) -> None:
        self._weight = weight.to(torch.float64)
        # |row| <= 2^31 and |weight| < 2^(b-1): 2^(23-b) terms sum to at most 2^53
        self._chunk = 1 << (23 - weight_bits)

    def product(self, rows: Tensor, *, transposed: bool) -> Tensor:
        matrix = self._weight if transposed else self._weight.t()
        x = rows.to(torch.float64)
        out: Tensor | None = None
        for start in range(0, matrix.shape[0], self._chunk):
            stop = start + self._chunk
            part = (x[:, start:stop] @ matrix[start:stop]).to(torch.int64).to(torch.int32)
            out = part if out is None else out.add_(part)
        assert out is not None  # a group has at least one input feature
        return out


class LimbKernel(Kernel):
    name = "limbs"
    _BALANCE = -0x7F7F7F80  # 0x80808080 as int32: adding and xoring it makes every byte a balanced digit

    @classmethod
    def supports(cls, *, device: torch.device, width: int) -> bool:
        return width <= 1 << 16  # int32 accumulators of 2^7 * 2^7 terms

    def __init__(self, weight: Tensor, *, weight_bits: int) -> None:
        self._outputs, self._inputs = weight.shape
        digits = [weight]
        if weight_bits > 8:
            low = ((weight + 0x80) & 0xFF) - 0x80
            digits = [low, (weight - low) >> 8]
        self._digits = [
            pad(w.to(torch.int8), (0, -self._inputs % 8, 0, -self._outputs % 8)).contiguous() for w in digits
        ]
        self._turned: list[Tensor] | None = None

    def _matrices(self, transposed: bool) -> list[Tensor]:
        """Column-major int8 `[width, outputs]`, the layout that int8 tensor cores read."""
        if not transposed:
            return [w.t() for w in self._digits]
        if self._turned is None:
            self._turned = [w.t().contiguous() for w in self._digits]
        return [w.t() for w in self._turned]

    def product(self, rows: Tensor, *, transposed: bool) -> Tensor:
        matrices = self._matrices(transposed)
        count, outputs = rows.shape[0], (self._inputs if transposed else self._outputs)
        padded = max(8, count + -count % 8)
        x = pad(rows, (0, matrices[0].shape[0] - rows.shape[1], 0, padded - count))
        x.add_(self._BALANCE).bitwise_xor_(self._BALANCE)
        limbs = x.new_empty((4, *x.shape), dtype=torch.int8)
        for limb in limbs:
            limb.copy_(x)  # its lowest byte
            x >>= 8
        total: Tensor | None = None
        for j, matrix in enumerate(matrices):  # CUDA wants more than 16 rows: there are at least 3 limbs of 8
            parts = torch._int_mm(limbs[: 4 - j].flatten(0, 1), matrix).view(4 - j, padded, -1)
            for i, part in enumerate(parts):
                # a copy, for the result must not keep all parts in memory
                total = part.clone() if total is None else total.add_(part, alpha=1 << 8 * (i + j))
        assert total is not None
        return total[:count, :outputs].contiguous()


KERNELS: dict[str, type[Kernel]] = {k.name: k for k in (Int32Kernel, Float64Kernel, LimbKernel)}
"""Every kernel by name: what `[executor] kernel` in provider.toml may say, besides "auto"."""

_FEW, _MANY = 4, 64  # row counts that stand for their class when timing
_FEW_LIMIT = 8
_CPU_ROWS = 256  # of one product on a CPU
_choices: dict[tuple[object, ...], dict[tuple[bool, bool], str]] = {}


class RingMatrix:
    """A weight matrix ready for exact products on one device.

    Args:
        weight: int16 `[o, d]`.
        weight_bits: b.
        device: where products run.
        kernel: "auto", or a name in `KERNELS`; a named kernel must pass the self-test too.
    """

    def __init__(
        self, weight: Tensor, *, weight_bits: int, device: torch.device | str = "cpu", kernel: str = "auto"
    ) -> None:
        if kernel != "auto" and kernel not in KERNELS:
            raise ConfigError(f"kernel = {kernel!r} is unknown; choose auto, {', '.join(KERNELS)}")
        self.device = torch.device(device)
        self._weight = weight.to(self.device)
        self._weight_bits = weight_bits
        self._kernel = kernel
        self._prepared: dict[str, Kernel] = {}

    def product(self, rows: Tensor, *, transposed: bool = False) -> Tensor:
        """`rows @ W.T` mod 2^32, or `rows @ W` if transposed.

        Args:
            rows: int32 `[r, d]` (`[r, o]` if transposed) on any device; r may be 0.

        Returns:
            int32 `[r, o]` (`[r, d]`), contiguous, on this matrix's device.
        """
        outputs, inputs = self._weight.shape if not transposed else reversed(self._weight.shape)
        if rows.dim() != 2 or rows.shape[1] != inputs or rows.dtype != torch.int32:
            raise RangeError(f"expected int32 rows of width {inputs}, got {rows.dtype} {list(rows.shape)}")
        if not rows.shape[0]:
            return torch.empty((0, outputs), dtype=torch.int32, device=self.device)
        rows = rows.to(self.device).contiguous()
        kernel = self.chosen(rows.shape[0], transposed=transposed)
        if len(rows) <= _CPU_ROWS or self.device.type != "cpu":
            return kernel.product(rows, transposed=transposed)
        # kernels need several times the product's memory, and pages fresh from the system cost more than arithmetic
        return torch.cat([kernel.product(block, transposed=transposed) for block in rows.split(_CPU_ROWS)])

    def chosen(self, count: int, *, transposed: bool = False) -> Kernel:
        """The kernel that products of `count` rows use, tested and timed on first use."""
        shape_class = (str(self.device), *self._weight.shape, self._weight_bits, self._kernel)
        chosen = _choices.setdefault(shape_class, {})
        few = count <= _FEW_LIMIT
        name = chosen.get((transposed, few))
        if name is None:
            name = chosen[transposed, few] = self._fastest(transposed, _FEW if few else _MANY)
            self._prepared = {n: k for n, k in self._prepared.items() if n in chosen.values()}
        return self._prepare(name)

    def _prepare(self, name: str) -> Kernel:
        kernel = self._prepared.get(name)
        if kernel is None:
            kernel = self._prepared[name] = KERNELS[name](self._weight, weight_bits=self._weight_bits)
        return kernel

    def _fastest(self, transposed: bool, count: int) -> str:
        width = self._weight.shape[0 if transposed else 1]
        rows = probe_rows(count, width).to(self.device)
        times: dict[str, float] = {}
        for name in KERNELS if self._kernel == "auto" else (self._kernel,):
            if not KERNELS[name].supports(device=self.device, width=width):
                continue
            try:
                kernel = self._prepare(name)
                exact = is_exact(kernel, self._weight, rows, transposed=transposed)
            except (RuntimeError, NotImplementedError) as error:  # not built for this device or torch version
                log.debug("kernel %s cannot run here: %s", name, error)
                continue
            if not exact:
                log.warning("kernel %s is not exact on this machine and is left out", name)
                continue
            times[name] = min(self._time(kernel, rows, transposed) for _ in range(3))
        if not times:
            raise ConfigError(
                f"kernel = {self._kernel!r} gives no exact product of width {width} on {self.device}; "
                f"use kernel = 'auto' or device = 'cpu'"
            )
        return min(times, key=times.__getitem__)

    def _time(self, kernel: Kernel, rows: Tensor, transposed: bool) -> float:
        start = time.perf_counter()
        kernel.product(rows, transposed=transposed)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter() - start


def probe_rows(count: int, width: int) -> Tensor:
    """Public test rows that reach the corners of int32: extremes, alternating signs, every byte pattern."""
    mixed = torch.arange(count * width, dtype=torch.int64, device="cpu").reshape(count, width) * 0x9E3779B1 + 0x7F4A7C15
    rows = mixed.to(torch.int32)  # wraps: a Weyl sequence over the whole ring
    rows[0] = -(1 << 31)
    rows[-1] = (1 << 31) - 1
    return rows


def is_exact(kernel: Kernel, weight: Tensor, rows: Tensor, *, transposed: bool) -> bool:
    """Self-test: compare with an int64 product (which wraps mod 2^64, so its low 32 bits are right).

    Some columns stand for all of them: spread over the whole matrix, the first and the last included.
    """
    matrix = weight if transposed else weight.t()
    columns = torch.linspace(0, matrix.shape[1] - 1, 32, dtype=torch.float64, device=weight.device).long().unique()
    want = (rows.cpu().to(torch.int64) @ matrix[:, columns].cpu().to(torch.int64)).to(torch.int32)
    got = kernel.product(rows, transposed=transposed)[:, columns].cpu()
    return torch.equal(got, want)
