"""Maps the tensors of a checkpoint to the parameters of its model, by the rules of transformers."""

import copy
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

from symbiosis_priv.checkpoints.checkpoint import Checkpoint
from symbiosis_priv.checkpoints.layers import GroupSpec, is_offloaded
from symbiosis_priv.errors import CheckpointError, UnsupportedModelError


@dataclass(frozen=True)
class Source:
    """The stored tensors that a parameter is made of.

    Args:
        converter: the rule of transformers that makes it; None if it is stored as it is used.
        parts: (the rule's pattern, stored name), in transformers' order.
    """

    parameter: str
    model: PreTrainedModel
    converter: WeightConverter | None
    parts: list[tuple[str | None, str]]

    def targets(self) -> list[str]:
        """The names of all parameters that the rule makes of these tensors."""
        if self.converter is None:
            return [self.parameter]
        first, *others = self.converter.target_patterns
        return [self.parameter, *(self.parameter.replace(first, other) for other in others)]

    def read(self, checkpoint: Checkpoint, parameter: str) -> Tensor:
        """The value of one of the parameters. The sizes of the stored tensors are checked before they are read. Raises
        `CheckpointError`: a stored tensor is missing or damaged, or the tensors do not fit together."""
        if self.converter is None:
            return checkpoint.tensor(self.parts[0][1])
        stored = sum(math.prod(checkpoint.shape(name)) for _, name in self.parts)
        if stored > sum(self.model.get_parameter_or_buffer(target).numel() for target in self.targets()):
            raise CheckpointError(
                f"{parameter} would be made of {len(self.parts)} tensors with {stored:,} numbers, more than config.json"
                f" says; fetch the checkpoint again"
            )
        converter: Any = copy.deepcopy(self.converter)
        for pattern, name in self.parts:
            converter.add_tensor(self.parameter, name, pattern, partial(checkpoint.tensor, name))
        try:
            made: Mapping[str, Tensor | list[Tensor]] = converter.convert(
                self.parameter, model=self.model, config=self.model.config
            )
            tensor = made[parameter]
        except CheckpointError:
            raise
        except Exception as error:  # the operations of transformers raise many types for tensors of other shapes
            raise CheckpointError(
                f"{parameter} cannot be made of {self.parts[0][1]} and {len(self.parts) - 1} more tensors ({error}); "
                f"fetch the checkpoint again"
            ) from error
        return tensor[0] if isinstance(tensor, list) else tensor


class StoredNames:
    """Maps the tensors of a checkpoint to parameters.

    Some checkpoints omit the base model's prefix or add it, and some modules were renamed after a checkpoint was
    written (GPT-NeoX's `embed_out` is `lm_head` now). Some store the matrices of experts one by one. The rules of
    transformers decide, so all readers agree.
    """

    def __init__(self, model: PreTrainedModel, groups: Iterable[GroupSpec]) -> None:
        rules = get_model_conversion_mapping(model)
        self._model = model
        self._renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
        self._converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
        self._parameters = model.state_dict()
        self._offloaded = frozenset(member for group in groups for member in group.members)

    def parameter(self, stored: str) -> str:
        """The name of the parameter that a stored tensor becomes; of the first one if the tensor holds several. If the
        tensor belongs to no parameter, the name has no meaning."""
        return self._renamed(stored)[0]

    def by_parameter(self, stored: Iterable[str]) -> dict[str, Source]:
        """Where the parameters of a model are stored, for the tensors of a checkpoint. Raises `CheckpointError`: two
        tensors map to one offloaded weight, and no rule joins them; `UnsupportedModelError`: a tensor holds both
        offloaded weights and weights of the tenant."""
        converters = {pattern: rule for rule in self._converters for pattern in rule.source_patterns}
        found: dict[str, Source] = {}
        for name in sorted(stored, key=dot_natural_key):  # the order in which transformers numbers experts
            parameter, pattern = self._renamed(name)
            converter = None if pattern is None else converters[pattern]
            source = found.setdefault(parameter, Source(parameter, self._model, converter, []))
            if source.parts and converter is None and is_offloaded(parameter, self._offloaded):
                raise CheckpointError(f"{source.parts[0][1]} and {name} are both {parameter}; delete one of them")
            source.parts.append((pattern, name))
        for source in found.values():
            self._refuse_mixed(source)
        return found | {target: source for source in found.values() for target in source.targets()}

    def _refuse_mixed(self, source: Source) -> None:
        """transformers drops all of a tensor if its first part is offloaded, and loads all of it otherwise."""
        offloaded = [target for target in source.targets() if is_offloaded(target, self._offloaded)]
        kept = [target for target in source.targets() if target not in offloaded]
        if offloaded and kept:
            raise UnsupportedModelError(
                f"{source.parts[0][1]} holds {offloaded[0]}, which is offloaded, and {kept[0]}, which cannot be; use "
                f"another base model"
            )

    def _renamed(self, stored: str) -> tuple[str, str | None]:
        """The name of a stored tensor's parameter, and the pattern of the rule that rearranges it on loading."""
        prefix = self._model.base_model_prefix or None
        name, pattern = rename_source_key(stored, self._renamings, self._converters, prefix, self._parameters)
        if name not in self._parameters and stored in self._parameters:
            return stored, None  # transformers, too, ignores a rule whose result is not a parameter
        return name, pattern
