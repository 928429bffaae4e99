"""Computes the products of several passes through a model as one product.

Each example to train on has a pass of its own, in its own thread (`tenant.overlapped`), so the bits of its results do
not depend on other examples: the exact products of the ring are the same in every batch, and everything else is
computed for one example alone. A pass that needs a product waits here. When all passes of the round wait, the products
of the same layer group and direction are computed as one: one request to the providers with the rows of all.
"""

import threading
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn

from symbiosis_priv.errors import DeadlineExceededError, NonFiniteError
from tenant.endpoint.engine.queued import Turn
from tenant.masking.backend import Backend, Product
from tenant.model.ledger import ledger_of
from tenant.model.remote_linear import RemoteLayer
from tenant.session.tally import Ledger

_WAIT_S = 900.0  # for the other passes of a round, and for the products of other engines
_Waiting = tuple[Product, Future[None]]


class Together(Backend):
    """The backend of a split model, whose layers use it from now on. It computes the products of a round together, each
    in a `turn` that the engines of the model share; other products as before."""

    def __init__(self, model: nn.Module, backend: Backend, turn: Turn) -> None:
        self.facts = backend.facts
        self._backend, self._turn, self._model = backend, turn, model
        for module in model.modules():
            if isinstance(module, RemoteLayer):
                module.group.backend = self

    def compute(self, product: Product) -> None:
        if (found := _round.get()) is None:
            self._backend.compute(product)
        else:
            found.compute(product)

    def compute_in_turn(self, product: Product) -> None:
        with self._turn:
            self._backend.compute(product)
            self._turn.counted = ledger_of(self._model) or Ledger()  # no request to an engine pays for it

    def forward_few(self, index: int, x: Tensor, dtype: torch.dtype) -> list[Tensor] | None:
        return None if _round.get() is not None else self._backend.forward_few(index, x, dtype)

    def multiply_all(self, products: Sequence[Product]) -> None:
        self._backend.multiply_all(products)

    def close(self) -> None:
        self._backend.close()


class Round:
    """The passes that compute at the same time. `count`: number of passes; each enters `taking_part` once."""

    def __init__(self, backend: Together, count: int) -> None:
        self._backend, self._active = backend, count
        self._waiting: list[_Waiting] = []
        self._lock = threading.Lock()

    @contextmanager
    def taking_part(self) -> Iterator[None]:
        """Context manager for a pass, in its thread: its products are computed with those of the others."""
        token = _round.set(self)
        try:
            yield
        finally:
            _round.reset(token)
            with self._lock:
                self._active -= 1
                self._compute_if_all_wait()

    def compute(self, product: Product) -> None:
        """Compute one product when all passes wait for theirs. Raises what the product raises."""
        done = Future[None]()
        with self._lock:
            self._waiting.append((product, done))
            self._compute_if_all_wait()
        if not wait([done], _WAIT_S).done:
            raise DeadlineExceededError(f"other passes of this round have computed for {_WAIT_S:g} s")
        done.result()

    def _compute_if_all_wait(self) -> None:
        if len(self._waiting) < self._active:
            return
        of_kind = defaultdict[Any, list[_Waiting]](list)
        for product, done in self._waiting:
            kind = product.group, product.direction, *(one.dtype for one in (*product.inputs, *product.outputs))
            of_kind[kind if product.counts is None else done].append((product, done))
        self._waiting.clear()
        for same in of_kind.values():
            self._compute(same)

    def _compute(self, same: Sequence[_Waiting]) -> None:
        """Compute some products of one kind together. With inf or nan in the rows of one, compute each alone."""
        products = [product for product, _ in same]
        first, *others = products
        try:
            if not others:
                self._backend.compute_in_turn(first)
            else:
                inputs = [torch.cat(blocks) for blocks in zip(*(one.inputs for one in products), strict=True)]
                outputs = [out.new_empty((len(inputs[0]), *out.shape[1:])) for out in first.outputs]
                self._backend.compute_in_turn(first._replace(inputs=inputs, outputs=outputs))
                parts = zip(*(out.split([len(one.inputs[0]) for one in products]) for out in outputs), strict=True)
                for one, own in zip(products, parts, strict=True):
                    for out, part in zip(one.outputs, own, strict=True):
                        out.copy_(part)
        except BaseException as error:
            if others and isinstance(error, NonFiniteError):
                for waiting in same:
                    self._compute([waiting])
                return
            for _, done in same:
                done.set_exception(error)
            return
        for _, done in same:
            done.set_result(None)


_round: ContextVar[Round | None] = ContextVar("round", default=None)
