"""Public knowledge: the checkpoint, and therefore everything that can be computed from it.

Providers hold the frozen linears; the embeddings, norms and tokenizer of a public base model can be downloaded. So an
adversary can run the whole base model on any text and read any layer. The adversary does not know the tenant's
adapters.
"""

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from symbiosis_priv.arithmetic.quantise import QuantisedGroup
from symbiosis_priv.arithmetic.ring import BACKWARD, Bound, Direction, quantise_rows
from symbiosis_priv.checkpoints.manifest import Manifest
from symbiosis_priv.checkpoints.weights import WeightStore
from symbiosis_priv.limits import RingBits
from symbiosis_priv.network import wire


@dataclass(frozen=True, eq=False)
class Public:
    """The public base model (float32, without any adapter), its quantised groups, and tokens of public text, int64
    `[n]`. `siblings` are groups that receive the same rows; if the tenant fuses siblings, each tuple has one group."""

    model: PreTrainedModel
    store: WeightStore
    corpus: Tensor
    pad_token: int
    siblings: tuple[tuple[int, ...], ...]

    @property
    def manifest(self) -> Manifest:
        return self.store.manifest()

    @property
    def vocabulary(self) -> int:
        return int(self.model.config.vocab_size)

    @property
    def layers(self) -> int:
        return int(self.model.config.num_hidden_layers)

    def has(self, suffix: str) -> bool:
        """Returns True if an offloaded linear's name has this ending. A tied head is not offloaded."""
        return any(member.endswith(suffix) for entry in self.manifest.groups for member in entry.members)

    def group_of(self, suffix: str, *, layer: int | None = None) -> int:
        """Index of the group with a member called `...layers.<layer>....<suffix>`. Raises KeyError if there is none."""
        for index, entry in enumerate(self.manifest.groups):
            for member in entry.members:
                if member.endswith(suffix) and (layer is None or f".{layer}." in member):
                    return index
        raise KeyError(suffix)

    @functools.cache  # noqa: B019 (one Public lives as long as the report)
    def quantised(self, index: int) -> QuantisedGroup:
        return self.store.group(index)

    @functools.cache  # noqa: B019
    def bound(self, index: int, direction: Direction) -> Bound:
        return self.quantised(index).bounds()[direction]

    def served_weight(self, index: int, member: str, *, arithmetic: wire.Arithmetic) -> Tensor:
        """The weight of a member in this arithmetic, float64 `[o, d]`. The member's name ends in `member`."""
        if arithmetic != "ring":
            return next(m.weight.double() for m in self.store.layers(index) if m.name.endswith(member))
        entry, quantised = self.manifest.groups[index], self.quantised(index)
        place = next(i for i, name in enumerate(entry.members) if name.endswith(member))
        weight = quantised.weight.double() * quantised.channel_scale[:, None]
        part: Tensor = weight.split(list(entry.outputs))[place]
        return part

    def in_ring(
        self, index: int, direction: Direction, rows: Tensor, *, ring_bits: RingBits = 32
    ) -> tuple[Tensor, Tensor]:
        """Float rows as a tenant would send them unmasked: (int32 `[r, d]`, float64 scale `[r, 1]`)."""
        if direction == BACKWARD:
            rows = rows.double() * self.quantised(index).channel_scale
        return quantise_rows(rows, self.bound(index, direction).narrowed(ring_bits))

    def next_inputs(self, index: int, prefixes: Tensor) -> Tensor:
        """The inputs of a group for every token after prefixes, int64 `[b, t]`. Returns float32 `[b, v, d]`."""
        known = self.tried.setdefault(index, {})
        wanted = [tuple(prefix) for prefix in prefixes.tolist()]
        new = [place for place, prefix in enumerate(wanted) if prefix not in known]
        if new:
            tokens, past = torch.arange(self.vocabulary), DynamicCache()
            with torch.no_grad():
                if prefixes.shape[1]:
                    self._until(index, input_ids=prefixes[new], past_key_values=past)
                    past.batch_repeat_interleave(len(tokens))
                seen = self._until(index, input_ids=tokens.repeat(len(new))[:, None], past_key_values=past)
            found = seen.view(len(new), len(tokens), -1)
            known |= zip((wanted[place] for place in new), found, strict=True)
        return torch.stack([known[prefix] for prefix in wanted])

    @functools.cached_property
    def tried(self) -> dict[int, dict[tuple[int, ...], Tensor]]:
        """A cache, by group and prefix: attacks try the same prefixes several times, on several schemes."""
        return {}

    def inputs_at(self, index: int, ids: Tensor) -> Tensor:
        """The inputs of a group for tokens `[b, t]`: float32 `[b, t, d]`."""
        with torch.no_grad():
            return self._until(index, input_ids=ids, use_cache=False)

    def _until(self, index: int, **inputs: Any) -> Tensor:
        """Run the base model up to a group. Returns the group's input."""
        module = self.model.get_submodule(self.manifest.groups[index].members[0])

        def stop(module: object, args: tuple[Tensor, ...]) -> None:
            raise _Arrived(args[0])

        handle = module.register_forward_pre_hook(stop)
        try:
            self.model(**inputs)
        except _Arrived as arrived:
            rows: Tensor = arrived.args[0]
            return rows
        finally:
            handle.remove()
        raise AssertionError("every group is reached")

    @functools.cached_property
    def vocabulary_rows(self) -> Tensor:
        """The inputs of the first group for every token, independent of the position: float32 `[v, d]`."""
        return self.next_inputs(0, torch.empty((1, 0), dtype=torch.long))[0]


class _Arrived(Exception):
    """Ends a forward pass, with the group's input."""


def alone(count: int) -> tuple[tuple[int, ...], ...]:
    """The value of `Public.siblings` for a tenant that sends every input once: each of `count` groups is alone."""
    return tuple((i,) for i in range(count))
