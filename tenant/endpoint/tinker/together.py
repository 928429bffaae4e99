"""Computes the products of several passes through a model as one product.

Each example to train on has a pass of its own, in its own thread (`tenant.overlapped`), so the bits of its results do
not depend on other examples: the exact products of the ring are the same in every batch, and everything else is
computed for one example alone. A pass that needs a product waits here. When all passes of the round wait, the products
of the same layer group and direction are computed as one: one request to the providers with the rows of all.
"""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn

from symbiosis_priv.errors import DeadlineExceededError, NonFiniteError, SymbiosisError
from tenant.endpoint.engine.queued import Turn
from tenant.masking.backend import Backend, Product
from tenant.model.ledger import ledger_of
from tenant.model.remote_linear import RemoteLayer
from tenant.session.tally import Ledger

_WAIT_S = 900.0  # for the other passes of a round, and for the products of other engines


class Round:
    """The passes that compute at the same time. `count`: number of passes; each enters `taking_part` once."""

    def __init__(self, count: int) -> None:
        self._active = count
        self._waiting: list[_Waiting] = []
        self._failed = False
        self._changed = threading.Condition()

    @contextmanager
    def taking_part(self) -> Iterator[None]:
        """Context manager for a pass, in its thread: its products are computed with those of the others."""
        token = _round.set(self)
        try:
            yield
        except BaseException:
            with self._changed:
                self._failed = True  # other passes may never begin, so nobody waits for them
                self._changed.notify_all()
            raise
        finally:
            _round.reset(token)
            with self._changed:
                self._active -= 1
                self._changed.notify_all()

    def compute(self, product: Product, backend: "Together") -> None:
        """Compute one product when all passes wait for theirs. Raises what the product raises."""
        own = _Waiting(product)
        with self._changed:
            self._waiting.append(own)
            self._changed.notify_all()
        while True:
            with self._changed:
                if not self._changed.wait_for(lambda: own.done or self._failed or self._is_first(own), _WAIT_S):
                    raise DeadlineExceededError(f"other passes of this round have computed for {_WAIT_S:g} s")
                if own.done:
                    break
                if self._failed:
                    raise SymbiosisError("another example of this round has failed")
                chosen = [one for one in self._waiting if one.kind == own.kind]
                for one in chosen:
                    one.taken = True
            try:
                _compute(chosen, backend)
            finally:
                with self._changed:
                    for one in chosen:
                        one.done = True
                        self._waiting.remove(one)
                    self._changed.notify_all()
        if own.error is not None:
            raise own.error

    def _is_first(self, own: "_Waiting") -> bool:
        """Return whether `own` is the first of the most frequent products, and every pass waits."""
        if len(self._waiting) < self._active or any(one.taken for one in self._waiting):
            return False
        kinds = [one.kind for one in self._waiting]
        return self._waiting[kinds.index(max(kinds, key=kinds.count))] is own


class _Waiting:
    def __init__(self, product: Product) -> None:
        self.product = product
        self.kind = (product.group, product.direction, *(one.dtype for one in (*product.inputs, *product.outputs)))
        self.taken = self.done = False
        self.error: BaseException | None = None


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
        if (found := _round.get()) is None or product.counts is not None:
            self._backend.compute(product)
        else:
            found.compute(product, self)

    def compute_all(self, product: Product) -> None:
        """Compute the product of a round."""
        with self._turn:
            self._backend.compute(product)
            self._turn.counted = ledger_of(self._model) or Ledger()  # no request to an engine pays for it

    def forward_few(self, index: int, x: Tensor, dtype: torch.dtype) -> list[Tensor] | None:
        return None if _round.get() is not None else self._backend.forward_few(index, x, dtype)

    def multiply_all(self, products: Sequence[Product]) -> None:
        self._backend.multiply_all(products)

    def close(self) -> None:
        self._backend.close()


def _compute(chosen: Sequence[_Waiting], backend: Together) -> None:
    """Compute some products of one kind together. With inf or nan in the rows of one, compute each alone."""
    first = chosen[0].product
    try:
        if len(chosen) == 1:
            backend.compute_all(first)
            return
        inputs = [torch.cat(blocks) for blocks in zip(*(one.product.inputs for one in chosen), strict=True)]
        rows = len(inputs[0])
        outputs = [torch.empty((rows, out.shape[1]), dtype=out.dtype, device=out.device) for out in first.outputs]
        backend.compute_all(first._replace(inputs=inputs, outputs=outputs))
    except NonFiniteError as error:
        if len(chosen) == 1:
            chosen[0].error = error
        else:
            for one in chosen:
                _compute([one], backend)
        return
    except BaseException as error:
        for one in chosen:
            one.error = error
        return
    start = 0
    for one in chosen:
        end = start + len(one.product.inputs[0])
        for out, whole in zip(one.product.outputs, outputs, strict=True):
            out.copy_(whole[start:end])
        start = end


_round: ContextVar[Any] = ContextVar("round", default=None)
