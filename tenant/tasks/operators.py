"""Computes the adapters of many tasks at one layer.

A tuner layer of PEFT computes an operator around its base layer: `y = after(x, base(before(x)))`. The operators of
tasks with the same method and the same sizes are computed together, with batched products (`OPERATORS`). All other
methods run PEFT's own code, one task after the other (`ByPeft`). Either way the base layer runs once for all tasks.

Rows are sorted by task, and each task has the same number of rows, so a tensor of `tasks * rows` sequences can be
viewed as `[tasks, rows * tokens, width]`.

Where a row's bits must not depend on the other rows (`block`), `RowBlocks` computes each task's products and functions.
PEFT's own code may call anything, so it gets that number of rows at a time: every product has the shape of one block,
and a row's result does not depend on the other blocks.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from contextlib import nullcontext
from functools import cached_property
from typing import Any

import torch
from peft.tuners import ia3, lora, oft
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn

from tenant.tasks.adapter import NAME, base_layer
from tenant.tasks.methods.outputs import BitFitLayer, BottleneckLayer
from tenant.tasks.row_blocks import EXACT, exact_linear


class Operator(ABC):
    """The adapters of some tasks at one layer of the model. `layers`: one layer per task. `block`: None if a row's bits
    may depend on the other rows; otherwise the number of rows that PEFT's own code gets at a time."""

    row_exact = True
    """False if `block` needs PEFT's own code."""

    def __init__(self, layers: Sequence[Any], *, block: int | None) -> None:
        self.layers, self.block = layers, block

    @property
    def changes_input(self) -> bool:
        """False if `before` returns None for every input."""
        return False

    def before(self, x: Tensor) -> Tensor | None:
        """Return the base layer's input for these tasks' rows `x`, in the dtype of `x`; None for `x` itself."""
        return None

    @abstractmethod
    def after(self, x: Tensor, y: Tensor, base: Callable[..., Tensor]) -> Tensor:
        """Return the output, in the dtype of `y`.

        Args:
            x: these tasks' rows of the layer's input.
            y: the base layer's output for the input that `before` returned.
            base: computes the base layer once more, for methods that need a second product.
        """


class _Grouped(Operator):
    @classmethod
    @abstractmethod
    def key(cls, layer: Any) -> Hashable | None:
        """Return the layer's key; None if this operator cannot compute the layer. Layers with equal keys are computed
        together."""

    def stack(self, tensor: Callable[[Any], Tensor]) -> Tensor:
        """Stack one tensor per task along a new first dimension; a single tensor is not copied."""
        return _stacked([tensor(layer) for layer in self.layers])

    def per_row(self, vectors: Tensor, like: Tensor) -> Tensor:
        """Repeat the vector of each task, `[tasks, width]`, for the rows of `like`, `[tasks * rows, ..., width]`."""
        rows = vectors.repeat_interleave(len(like) // len(vectors), dim=0)
        shaped: Tensor = rows.reshape(len(like), *[1] * (like.dim() - 2), rows.shape[-1])
        return shaped

    def by_task(self, x: Tensor) -> Tensor:
        """View `x` as `[tasks, rows * tokens, width]`."""
        return x.reshape(len(self.layers), -1, x.shape[-1])


class Lora(_Grouped):
    """LoRA: `y + (x A^T) B^T * scaling`, for tasks of one rank and one scaling."""

    @classmethod
    def key(cls, layer: Any) -> Hashable | None:
        if NAME not in layer.lora_A or layer.lora_variant or layer.lora_bias[NAME]:
            return None
        a = layer.lora_A[NAME].weight
        return a.shape, a.dtype, layer.scaling[NAME], _dropout(layer.lora_dropout[NAME])

    def after(self, x: Tensor, y: Tensor, base: Callable[..., Tensor]) -> Tensor:
        first, (a, b) = self.layers[0], self._weights
        dropped = first.lora_dropout[NAME](first._cast_input_dtype(x, a[0].dtype))
        rows = self.by_task(dropped)
        if self.block is None:
            delta = rows @ _stacked(a).transpose(1, 2) @ _stacked(b).transpose(1, 2)
        else:
            each = zip(rows.unbind(), a, b, strict=True)
            delta = _stacked([exact_linear(exact_linear(part, down), up) for part, down, up in each])
        out: Tensor = (y + (delta * first.scaling[NAME]).view_as(y)).to(y.dtype)
        return out

    @cached_property
    def _weights(self) -> tuple[list[Tensor], list[Tensor]]:
        layers = self.layers
        return [layer.lora_A[NAME].weight for layer in layers], [layer.lora_B[NAME].weight for layer in layers]


class IA3(_Grouped):
    """IA3: multiplies the base layer's input or output by a vector."""

    @classmethod
    def key(cls, layer: Any) -> Hashable | None:
        return None if NAME not in layer.ia3_l else (layer.is_feedforward, layer.ia3_l[NAME].dtype)

    @property
    def changes_input(self) -> bool:
        return bool(self.layers[0].is_feedforward)

    def before(self, x: Tensor) -> Tensor | None:
        return self._scaled(x) if self.changes_input else None

    def after(self, x: Tensor, y: Tensor, base: Callable[..., Tensor]) -> Tensor:
        return y if self.changes_input else self._scaled(y)

    def _scaled(self, x: Tensor) -> Tensor:
        return (x * self.per_row(self.stack(lambda layer: layer.ia3_l[NAME].flatten()), x)).to(x.dtype)


class OFT(_Grouped):
    """OFT: rotates blocks of the base layer's input."""

    row_exact = False

    @classmethod
    def key(cls, layer: Any) -> Hashable | None:
        if NAME not in layer.oft_R:
            return None
        r = layer.oft_R[NAME]
        if r.coft or getattr(layer, "merged", False):
            return None
        cayley = r.use_cayley_neumann, r.num_cayley_neumann_terms
        return r.weight.shape, r.weight.dtype, r.block_size, r.block_share, cayley

    @property
    def changes_input(self) -> bool:
        return True

    def before(self, x: Tensor) -> Tensor | None:
        weights = [layer.oft_R[NAME].weight for layer in self.layers]
        rows = self.by_task(x.to(weights[0].dtype)).unflatten(-1, (-1, self.layers[0].oft_R[NAME].block_size))
        first = self.layers[0].oft_R[NAME]
        cayley = first.use_cayley_neumann, first.num_cayley_neumann_terms
        made: Tensor = first._cayley_batch(_stacked(weights).flatten(0, 1), first.block_size, *cayley)
        rotations = made.unflatten(0, (len(weights), -1))
        rotations = rotations.expand(-1, rows.shape[-2], -1, -1)  # with block_share, all blocks have one rotation
        return torch.einsum("tmrk,trkc->tmrc", rows, rotations).reshape(x.shape).to(x.dtype)

    def after(self, x: Tensor, y: Tensor, base: Callable[..., Tensor]) -> Tensor:
        return y


class Bottleneck(_Grouped):
    """Bottleneck adapters: `y + up(activation(down(y)))`."""

    @classmethod
    def key(cls, layer: Any) -> Hashable | None:
        if NAME not in layer.bottleneck_down:
            return None
        down = layer.bottleneck_down[NAME].weight
        return down.shape, down.dtype, type(layer.activation[NAME])

    def after(self, x: Tensor, y: Tensor, base: Callable[..., Tensor]) -> Tensor:
        down, up = (
            [getattr(layer, name)[NAME] for layer in self.layers] for name in ("bottleneck_down", "bottleneck_up")
        )
        rows = self.by_task(y.to(down[0].weight.dtype))
        activation = self.layers[0].activation[NAME]
        if self.block is None:
            added = self._linears(activation(self._linears(rows, down)), up)
        else:
            with EXACT:
                each = zip(rows.unbind(), down, up, strict=True)
                added = _stacked([after(activation(before(part))) for part, before, after in each])
        return y + added.view_as(y).to(y.dtype)

    def _linears(self, rows: Tensor, modules: Sequence[Any]) -> Tensor:
        weight, bias = (_stacked([getattr(module, name) for module in modules]) for name in ("weight", "bias"))
        return torch.baddbmm(bias.unsqueeze(1), rows, weight.transpose(1, 2))


class BitFit(_Grouped):
    """BitFit: `y` plus a vector."""

    @classmethod
    def key(cls, layer: Any) -> Hashable | None:
        return layer.bitfit_bias[NAME].dtype if NAME in layer.bitfit_bias else None

    def after(self, x: Tensor, y: Tensor, base: Callable[..., Tensor]) -> Tensor:
        return y + self.per_row(self.stack(lambda layer: layer.bitfit_bias[NAME]), y).to(y.dtype)


class ByPeft(Operator):
    """Any PEFT layer: runs PEFT's own code for one task.

    PEFT's code calls the base layer. To find the base layer's input, the code runs up to that call, and runs again when
    the product is known. The code of a layer that passes its own input to the base layer runs only once.
    """

    def __init__(self, layers: Sequence[Any], *, block: int | None) -> None:
        super().__init__(layers, block=block)
        self._layer = layers[0]
        self._mode = nullcontext() if block is None else EXACT
        # True once it is known that the base layer gets the layer's own input or is not used
        self._passes_on = not isinstance(self._layer, BaseTunerLayer)

    @property
    def changes_input(self) -> bool:
        return not self._passes_on

    def before(self, x: Tensor) -> Tensor | None:
        def stop(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            raise _BaseLayerCalled(x)

        changed = []
        for part in self._parts(x):
            if self._passes_on:
                return None
            try:
                with base_layer(stop), self._mode:
                    self._layer(part)
                self._passes_on = True  # the method replaces the base layer
            except _BaseLayerCalled as asked:
                self._passes_on = asked.x is part
                changed.append(asked.x)
        return None if self._passes_on else _joined(changed, len(x))

    def after(self, x: Tensor, y: Tensor, base: Callable[..., Tensor]) -> Tensor:
        parts = zip(self._parts(x), self._parts(y), strict=True)
        return _joined([self._after(part, its_y, base) for part, its_y in parts], len(x))

    def _parts(self, x: Tensor) -> Sequence[Tensor]:
        if self.block is None:
            return [x]
        missing = -len(x) % self.block
        filled = torch.cat([x, x[-1:].expand(missing, *x.shape[1:])])  # any row fills a block
        return [filled[start : start + self.block] for start in range(0, len(filled), self.block)]

    def _after(self, x: Tensor, y: Tensor, base: Callable[..., Tensor]) -> Tensor:
        waiting = [y]

        def run(z: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            if waiting and (z is x or not self._passes_on):
                return waiting.pop()
            return base(z, *args, **kwargs)

        with base_layer(run), self._mode:
            out: Tensor = self._layer(x)
        return out


OPERATORS: dict[type[nn.Module], type[_Grouped]] = {
    lora.Linear: Lora,
    ia3.Linear: IA3,
    oft.Linear: OFT,
    BottleneckLayer: Bottleneck,
    BitFitLayer: BitFit,
}
"""The operators that compute layers of several tasks together, by the layer's class."""


def operator_key(layer: nn.Module) -> tuple[type[Operator], Hashable]:
    """Return the operator of a layer, and the key of the layers that are computed together with it."""
    kind = OPERATORS.get(type(layer))
    moved = isinstance(layer, BaseTunerLayer) and getattr(layer.get_base_layer(), "moved", None)
    key = None if kind is None or moved else kind.key(layer)
    return (ByPeft, id(layer)) if kind is None or key is None else (kind, key)


class _BaseLayerCalled(BaseException):
    def __init__(self, x: Tensor) -> None:
        self.x = x


def _stacked(tensors: Sequence[Tensor]) -> Tensor:
    return torch.stack(tuple(tensors)) if len(tensors) > 1 else tensors[0].unsqueeze(0)


def _joined(parts: Sequence[Tensor], count: int) -> Tensor:
    return torch.cat(tuple(parts))[:count] if len(parts) > 1 else parts[0][:count]


def _dropout(module: nn.Module) -> float:
    return module.p if isinstance(module, nn.Dropout) and module.training else 0.0
