"""Makes local functions of rows return the same bits for a row in every step, whatever the other rows are.

Products of providers are exact. A local matrix product is not: BLAS chooses the order of additions by the number of
rows. Neither are functions such as `tanh`: the vectorised code and the code for the last elements differ in the last
bit, and the number of rows decides which of them computes an element.

    linear      the compiled library has one whose rows do not depend on each other (`native.linear`)
    products    otherwise in blocks of `ROWS` rows, so each call has the same shape. With some shapes, BLAS's order also
                depends on a row's place in the block (MKL with AVX2: nearly all; oneDNN: bfloat16 with three threads).
                A shape is tested at its first call, and such rows are computed one at a time.
    functions   rows of whole vectors together, as far as no thread gets a part of a vector; all others one at a time

A torch function mode delays each call of torch, and a step of a Llama makes 50 of them per layer. `ModuleBlocks` enters
the mode only in modules that call such functions: activations, rotary embeddings and the LM head.
"""

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from symbiosis_priv.native import can_multiply, linear

ROWS = 8
"""Rows of a block."""
_POINTWISE = ("sigmoid", "tanh", "exp", "exp2", "expm1", "log", "log1p", "erf", "sin", "cos")
_FUNCTIONS: frozenset[Callable[..., Any]] = frozenset(
    (
        *(getattr(kind, name) for kind in (torch, Tensor) for name in _POINTWISE),
        *(F.silu, F.gelu, F.softplus, F.mish, F.elu, F.selu, F.logsigmoid),
    )
)
_ROWS_AT: dict[Callable[..., Any], int] = {F.linear: 0, torch.addmm: 1, **dict.fromkeys(_FUNCTIONS, 0)}
"""The index of the argument whose first dimension is rows, by function."""
_VECTORS = 64  # elements that torch's loops compute at a time: two vectors of 512 bits with 16 bits per element
_SERIAL = 1 << 14  # elements up to which a loop is either serial or divided between all threads


class RowBlocks(TorchFunctionMode):
    """While this mode is active, a row of a local function does not depend on the other rows. `callers`: the classes in
    `running` that have called such a function while they were the last one."""

    def __init__(self) -> None:
        super().__init__()
        self.running: list[type] = []
        self.callers: set[type] = set()
        self._sizes: dict[tuple[object, ...], int] = {}

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        at = _ROWS_AT.get(func)
        if at is None or len(args) <= at or args[at].dim() < 2 or kwargs.get("inplace") or "out" in kwargs:
            return func(*args, **kwargs)
        self.callers.update(self.running[-1:])
        rows = args[at]
        if func is F.linear and len(args) > 1 and can_multiply(rows, args[1]):
            bias = args[2] if len(args) > 2 else kwargs.get("bias")
            return linear(rows, args[1]) if bias is None else linear(rows, args[1]) + bias

        def compute(block: Tensor) -> Tensor:
            result: Tensor = func(*args[:at], block, *args[at + 1 :], **kwargs)
            return result

        if func in _FUNCTIONS:
            # vectorised code must compute every element: so many rows may be computed together
            width = rows.shape[1:].numel()
            threads = torch.get_num_threads() if rows.is_cpu else 1
            together = max(1, _SERIAL // width) if width and width % (_VECTORS * threads) == 0 else 1
            if len(rows) <= together:
                return compute(rows.contiguous())
            # copies, so that each part is aligned like a single row
            return torch.cat([compute(part.clone()) for part in rows.contiguous().split(together)])
        if not (count := len(rows)):
            return compute(rows)
        others = tuple(tuple(other.shape) if isinstance(other, Tensor) else other for other in args[at + 1 :])
        key = (func, rows.shape[1:], rows.dtype, rows.device, torch.get_num_threads(), others)
        size = self._sizes.get(key)
        if size is None:
            size = self._sizes[key] = 1 if _place_matters(func, args, at, kwargs) else ROWS
        missing = -count % size
        if missing or not rows.is_contiguous():
            filled = rows.new_zeros((count + missing, *rows.shape[1:]))
            filled[:count] = rows
            rows = filled
        # BLAS may choose the order by the alignment, too, and that of a new tensor is always the same
        blocks = [compute(block.clone() if block.data_ptr() % 64 else block) for block in rows.split(size)]
        return (torch.cat(blocks) if len(blocks) > 1 else blocks[0])[:count]


EXACT = RowBlocks()


def exact_linear(rows: Tensor, weight: Tensor) -> Tensor:
    """Compute `F.linear` of rows `[r, d]`: a row's bits do not depend on the other rows."""
    if can_multiply(rows, weight):  # a mode would take longer than a small product
        return linear(rows, weight)
    with EXACT:
        return F.linear(rows, weight)


class ModuleBlocks:
    """Activates `RowBlocks` in the modules of a model that call such functions themselves.

    The first pass without adapters runs in the mode as a whole, and shows the classes of these modules. A class that
    did not run in that pass is taken for one of them.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model, self._mode = model, RowBlocks()
        self._classes: set[type] | None = None
        self._hooks: list[Any] = []
        self._thread = _ThreadState()

    @contextmanager
    def step(self, *, adapted: bool) -> Iterator[None]:
        """Context manager: one pass of the model in this thread. `adapted`: True if some rows have an adapter."""
        if self._classes is None:
            with self._mode, nullcontext() if adapted else self._observed():
                yield
            return
        states = self._thread.states = [False]
        try:
            yield
        finally:
            self._thread.states = None
            self._switch(states[-1], False)  # active only after an error

    def close(self) -> None:
        """Remove the hooks from the model."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    @contextmanager
    def _observed(self) -> Iterator[None]:
        ran: set[type] = set()
        running = self._mode.running

        def enter(module: nn.Module, _: Any) -> None:
            running.append(type(module))
            ran.add(type(module))

        def leave(*_: Any) -> None:
            running.pop()

        try:
            self._hook(self._model.modules(), enter, leave)
            yield
        finally:
            self.close()
            running.clear()
        self._classes = {kind for kind in map(type, self._model.modules()) if kind not in ran} | self._mode.callers
        around = [module for module in self._model.modules() if type(module) in self._classes]
        inside = [child for module in around for child in module.children()]
        self._hook({*around, *inside}, self._enter, self._leave)

    def _hook(self, modules: Iterable[nn.Module], enter: Callable[..., None], leave: Callable[..., None]) -> None:
        for module in modules:
            self._hooks += module.register_forward_pre_hook(enter), module.register_forward_hook(leave)

    def _enter(self, module: nn.Module, _: Any) -> None:
        if (states := self._thread.states) is not None and self._classes is not None:
            states.append(type(module) in self._classes)
            self._switch(states[-2], states[-1])

    def _leave(self, *_: Any) -> None:
        if (states := self._thread.states) is not None:
            self._switch(states.pop(), states[-1])

    def _switch(self, before: bool, after: bool) -> None:
        if after and not before:
            self._mode.__enter__()  # type: ignore[no-untyped-call]
        elif before and not after:
            self._mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self  # of a copied module's hooks: an adapter's copy of the LM head needs the mode as well


class _ThreadState(threading.local):
    """Whether the mode is active in each module that runs in this thread, the innermost last; None between steps."""

    states: list[bool] | None = None


@torch.no_grad()
def _place_matters(func: Callable[..., Any], args: Sequence[Any], at: int, kwargs: dict[str, Any]) -> bool:
    """Returns True if equal rows of a block have different products with a weight of this shape. In half of the tests
    the exact products are zero, so that the bits of a result are those of its rounding alone."""
    if len(args) <= at + 1:  # the weight is a keyword
        return True
    rows, weight = args[at], args[at + 1]
    generator = torch.Generator(device=rows.device).manual_seed(0)
    others = [torch.zeros_like(other) if isinstance(other, Tensor) else other for other in args]
    outputs, half = weight.numel() // rows.shape[-1], rows.shape[-1] // 2
    for number in range(2 * min(8, max(1, 4096 // outputs))):  # many outputs are many tests
        row, weights = (torch.empty_like(like).normal_(generator=generator) for like in (rows[:1], weight))
        if number % 2:
            by_input = weights.t() if func is F.linear else weights
            row[..., half:], by_input[half : 2 * half] = 0, by_input[:half]
            row[..., half : 2 * half] = -row[..., :half]
        others[at], others[at + 1] = row.expand(ROWS, *row.shape[1:]).contiguous(), weights
        products = func(*others, **kwargs)
        if not torch.equal(products, products[:1].expand_as(products)):
            return True
    return False
