"""Runs several passes through a model together, and computes their products as one product.

Theory of operation. Each example to train on has a pass of its own, in its own thread, so the bits of its results do
not depend on other examples: the exact products of the ring are the same in every batch, and everything else is
computed for one example alone. The passes take turns, because threads that compute at the same time disturb each other:
a pass holds a condition until it needs a product, and waits. When all passes wait, the products of the same layer group
and direction are computed as one: one request to the providers with the rows of all.
"""

import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextvars import ContextVar
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from symbiosis_priv.errors import DeadlineExceededError, NonFiniteError
from tenant.endpoint.engine.queued import Turn
from tenant.masking.backend import Backend, Product
from tenant.model.ledger import ledger_of
from tenant.model.remote_linear import RemoteLayer
from tenant.session.tally import Ledger
from tenant.worker import Worker

P = TypeVar("P")
R = TypeVar("R")

PASSES = 32
"""Largest number of passes of a round."""
_WAIT_S = 900.0  # for the other passes of a round, and for the products of other engines
_Waiting = tuple[Product, Future[None]]
_takes_part = ContextVar("takes_part", default=False)


class Together(Backend):
    """The backend of a split model, whose layers use it from now on. It computes the products of a round together, each
    in a `turn` that the engines of the model share; other products as before. There is one round at a time."""

    def __init__(self, model: nn.Module, backend: Backend, turn: Turn) -> None:
        self.facts = backend.facts
        self._backend, self._turn, self._model = backend, turn, model
        self._threads = [Worker(f"tinker-pass-{number}") for number in range(PASSES)]
        self._computing = threading.Condition()  # held by the pass that computes
        self._active, self._waiting = 0, list[_Waiting]()
        for module in model.modules():
            if isinstance(module, RemoteLayer):
                module.group.backend = self

    def run(self, work: Callable[[P], R], parts: Sequence[P]) -> list[Future[R]]:
        """Compute a round: call `work` for each of at most `PASSES` parts. The futures get the results."""
        self._active = len(parts)
        return [thread.submit(self._run, work, part) for thread, part in zip(self._threads, parts, strict=False)]

    def compute(self, product: Product) -> None:
        """Compute one product: that of a round when all passes wait for theirs. Raises what the product raises."""
        if not _takes_part.get():
            self._backend.compute(product)
            return
        done = Future[None]()
        self._waiting.append((product, done))
        self._compute_if_all_wait()
        if not self._computing.wait_for(done.done, _WAIT_S):
            raise DeadlineExceededError(f"other passes of this round have computed for {_WAIT_S:g} s")
        done.result()

    def forward_few(self, index: int, x: Tensor, dtype: torch.dtype) -> list[Tensor] | None:
        return None if _takes_part.get() else self._backend.forward_few(index, x, dtype)

    def multiply_all(self, products: Sequence[Product]) -> None:
        self._backend.multiply_all(products)

    def close(self) -> None:
        """Stop the threads of the passes. The backend stays open."""
        for thread in self._threads:
            thread.stop()

    def _run(self, work: Callable[[P], R], part: P) -> R:
        _takes_part.set(True)
        with self._computing:
            try:
                return work(part)
            finally:
                self._active -= 1
                self._compute_if_all_wait()

    def _compute_if_all_wait(self) -> None:
        if len(self._waiting) < self._active:
            return
        of_kind = defaultdict[Any, list[_Waiting]](list)
        for product, done in self._waiting:
            kind = product.group, product.direction, *(one.dtype for one in (*product.inputs, *product.outputs))
            of_kind[kind if product.counts is None else done].append((product, done))
        self._waiting.clear()
        for same in of_kind.values():
            self._compute_as_one(same)
        self._computing.notify_all()

    def _compute_as_one(self, same: Sequence[_Waiting]) -> None:
        """Compute some products of one kind. With inf or nan in the rows of one, compute each alone."""
        products = [product for product, _ in same]
        try:
            inputs = [torch.cat(blocks) for blocks in zip(*(one.inputs for one in products), strict=True)]
            outputs = [out.new_empty((len(inputs[0]), *out.shape[1:])) for out in products[0].outputs]
            with self._turn:
                self._backend.compute(products[0]._replace(inputs=inputs, outputs=outputs))
                self._turn.counted = ledger_of(self._model) or Ledger()  # no request to an engine pays for it
            sizes = [len(one.inputs[0]) for one in products]
            for number, whole in enumerate(outputs):
                for one, part in zip(products, whole.split(sizes), strict=True):
                    one.outputs[number].copy_(part)
        except BaseException as error:
            for waiting in same:
                if len(same) > 1 and isinstance(error, NonFiniteError):
                    self._compute_as_one([waiting])
                else:
                    waiting[1].set_exception(error)
        else:
            for _, done in same:
                done.set_result(None)
