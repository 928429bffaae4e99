"""Counts the parameters that are offloaded and those that stay with the tenant, by kind."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch import nn
from transformers import PreTrainedModel

from symbiosis_priv.checkpoints.discovery.linears import experts_of, is_linear, routed_modules
from symbiosis_priv.checkpoints.discovery.skeleton import task_heads
from symbiosis_priv.checkpoints.layers import is_offloaded

OTHERS = "norms, biases and others"


@dataclass(frozen=True, kw_only=True)
class Division:
    """The parameters of a model, by the party that holds them. `offloaded`: number of parameters that providers hold.
    `kept`: number of parameters that stay with the tenant, by their kind, the largest first."""

    offloaded: int
    kept: Mapping[str, int]

    @property
    def parameters(self) -> int:
        return self.offloaded + sum(self.kept.values())

    @property
    def share(self) -> float:
        """The share of the parameters that providers hold, between 0 and 1."""
        return self.offloaded / self.parameters

    def __str__(self) -> str:
        kept = ", ".join(f"{kind} {count:,}" for kind, count in self.kept.items())
        return f"{self.share:.1%} of {self.parameters:,} parameters are offloaded; here stay {kept}"


def division(model: PreTrainedModel, members: Iterable[str]) -> Division:
    """Count the parameters of a model that is not split yet. `members`: the linears and stacks of experts that are
    offloaded. Their names may lack the base model's prefix."""
    prefix = f"{model.base_model_prefix}."
    names = {name.removeprefix(prefix) for name in members}
    modules = dict(model.named_modules())
    ties = model.all_tied_weights_keys  # on the meta device, tied modules have parameters of their own
    # the kinds of the modules that are kept because of their place in the model
    kinds = dict.fromkeys(task_heads(model), "heads of the task")
    experts = tuple(experts_of(model))
    for name in routed_modules(model):
        kinds[name] = "experts" if name.startswith(experts) else "routers of experts"
    owners = [[name.rpartition(".")[0] for name in tie] for tie in ties.items()]
    tables = {source for target, source in owners if target in names}
    for target, source in owners:
        kind = "for look-ups (as the LM head they are offloaded)" if source in tables else "that are also the LM head"
        kinds |= dict.fromkeys((target, source), f"embeddings {kind}")
    every = dict(model.named_parameters(remove_duplicate=False))
    kept: Counter[str] = Counter()
    offloaded = 0
    for name in dict.fromkeys(ties.get(name, name) for name in every):
        parameter = every[name]
        owner, _, leaf = name.rpartition(".")
        if is_offloaded(name.removeprefix(prefix), names) and leaf != "bias":
            offloaded += parameter.numel()
        elif parameter.dim() < 2:
            kept[OTHERS] += parameter.numel()
        elif owner in kinds:
            kept[kinds[owner]] += parameter.numel()
        elif is_linear(modules[owner]):
            kept["linears that the trace does not reach"] += parameter.numel()
        else:
            other = (nn.Embedding, "embeddings"), (nn.modules.conv._ConvNd, "convolutions"), (nn.Module, OTHERS)
            kept[next(kind for base, kind in other if isinstance(modules[owner], base))] += parameter.numel()
    return Division(offloaded=offloaded, kept=dict(kept.most_common()))
