"""The ground truth of a run: the tenant's own knowledge, which no view contains. Only scorers read it."""

from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor, nn

from symbiosis_priv.arithmetic.ring import Direction
from tenant.masking.backend import Backend, Product, RingBackend
from tenant.model.remote_linear import RemoteLayer
from threat_model.evidence.public import Public
from threat_model.evidence.views import Recorder

NO_LABEL = -100


@dataclass(frozen=True, eq=False)
class GroupCall:
    """One call of an offloaded layer group: the rows before masking, `[r, d]`, int32 in the ring, else float32; the
    token behind each row, int64 `[r]`, if rows are one per token; and its label (`NO_LABEL` for none)."""

    group: int
    direction: Direction
    rows: Tensor
    tokens: Tensor | None
    labels: Tensor | None


@dataclass(eq=False)
class Truth:
    """The tenant's side of a run: the calls by the order of their requests; `scaling * B @ A` of the final adapter by
    base module name, and its tensors; new tokens per sequence, and (sequences, tokens of each), of each generation."""

    calls: dict[int, GroupCall] = field(default_factory=dict)
    updates: dict[str, Tensor] = field(default_factory=dict)
    adapters: list[Tensor] = field(default_factory=list)
    generated: list[int] = field(default_factory=list)
    batches: list[tuple[int, int]] = field(default_factory=list)
    steps: int = 0
    coins: dict[Direction, Tensor] = field(default_factory=dict)
    """Which of two known rows was masked, in the second half of the distinguishing game; bool `[n]`."""

    def of(self, *, index: int | None = None, direction: Direction | None = None) -> dict[int, GroupCall]:
        """The calls of a group in a direction by their order; None stands for all."""
        wanted = self.calls.items()
        return {o: c for o, c in wanted if index in (None, c.group) and direction in (None, c.direction)}


class Witness(Backend):
    """Wraps a model's backend, and records the rows that the model passes to it."""

    def __init__(self, inner: Backend, recorder: Recorder, public: Public, truth: Truth) -> None:
        self.inner, self.facts = inner, inner.facts
        self._recorder, self._public, self._truth = recorder, public, truth
        self._ids = torch.empty((0, 0), dtype=torch.long)
        self._labels: Tensor | None = None

    @classmethod
    def install(cls, model: nn.Module, recorder: Recorder, public: Public, truth: Truth) -> Self:
        """Wrap the backend of every group of a split model."""
        groups = {id(m.group): m.group for m in model.modules() if isinstance(m, RemoteLayer)}
        witness = cls(next(iter(groups.values())).backend, recorder, public, truth)
        for group in groups.values():
            group.backend = witness

        def remember(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            witness._ids, witness._labels = kwargs["input_ids"].detach().cpu(), kwargs.get("labels")

        model.register_forward_pre_hook(remember, with_kwargs=True)
        return witness

    def compute(self, product: Product) -> None:
        self.inner.compute(product)
        index, direction = product.group, product.direction
        rows = torch.cat([part.detach() for part in product.inputs], dim=1)
        plain = rows.float()
        if isinstance(self.inner, RingBackend):
            bits = self.facts[index].bounds[direction].ring_bits
            plain, _ = self._public.in_ring(index, direction, rows, ring_bits=bits)
        tokens = labels = None
        batch, length = self._ids.shape
        if len(rows) in (batch * length, batch):  # the head gets the last position only
            keep = slice(None) if len(rows) == batch * length else slice(-1, None)
            tokens = self._ids[:, keep].flatten()
            if self._labels is not None:
                labels = torch.full_like(self._ids, NO_LABEL)
                labels[:, :-1] = self._labels[:, 1:]
                labels = labels[:, keep].flatten()
        call = GroupCall(index, direction, plain.clone(), tokens, labels)
        self._truth.calls[self._recorder.last_executed] = call

    def close(self) -> None:
        self.inner.close()


def adapter_updates(model: Any) -> dict[str, Tensor]:
    """`scaling * B @ A` of every LoRA layer of a PEFT model, by base module name; float32 `[o, d]`."""
    updates = {}
    for name, module in model.named_modules():
        if "default" in getattr(module, "lora_A", {}):
            a, b = module.lora_A["default"].weight, module.lora_B["default"].weight
            updates[name.removeprefix("base_model.model.")] = (module.scaling["default"] * (b @ a)).detach().clone()
    return updates
