"""Maps the tensors of a checkpoint to the parameters of its model."""

from collections.abc import Iterable

from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from symbiosis_priv.errors import CheckpointError, UnsupportedModelError


class StoredNames:
    """Maps the tensors of a checkpoint to parameters.

    Some checkpoints omit the base model's prefix or add it, and some modules were renamed after a checkpoint was
    written (GPT-NeoX's `embed_out` is `lm_head` now). The rules of transformers are used, so all readers agree.
    """

    def __init__(self, model: PreTrainedModel, offloaded: Iterable[str]) -> None:
        rules = get_model_conversion_mapping(model)
        self._renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
        self._converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
        self._prefix = model.base_model_prefix or None
        self._parameters = model.state_dict()
        self._offloaded = frozenset(offloaded)

    def parameter(self, stored: str) -> str:
        """Return the parameter that a stored tensor becomes. If the model has no such parameter, the name is not one of
        its parameters.

        Raises:
            UnsupportedModelError: the tensor belongs to an offloaded linear, and transformers rearranges it on loading.
        """
        prefix, parameters = self._prefix, self._parameters
        name, rearranged = rename_source_key(stored, self._renamings, self._converters, prefix, parameters)
        if name not in parameters and stored in parameters:
            return stored  # transformers, too, ignores a rule whose result is no parameter
        if rearranged is not None and name.rpartition(".")[0] in self._offloaded:
            raise UnsupportedModelError(
                f"{stored} is not stored as {name} is used: transformers rearranges it on loading, which providers do "
                f"not. Use another base model"
            )
        return name

    def by_parameter(self, stored: Iterable[str]) -> dict[str, str]:
        """Stored name of every parameter, for the tensors of a checkpoint.

        Raises:
            CheckpointError: two tensors map to one weight of an offloaded linear.
        """
        found: dict[str, str] = {}
        for name in stored:
            parameter = self.parameter(name)
            other = found.setdefault(parameter, name)
            if other != name and parameter.rpartition(".")[0] in self._offloaded:
                raise CheckpointError(f"{other} and {name} are both {parameter}; delete one of them")
        return found
