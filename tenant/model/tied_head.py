"""Offloads the product of a tied LM head. The embedding table stays with the tenant for look-ups.

Providers multiply by the table of the checkpoint, so the tenant's table must not change: it is frozen, and the head
raises an error if the table was trained or resized.
"""

from collections.abc import Mapping
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from symbiosis_priv.errors import UnsupportedMethodError
from tenant.model.remote_linear import RemoteLayer


def untie_head(model: PreTrainedModel, tied: Mapping[str, str]) -> list[nn.Module]:
    """Stop transformers from tying an offloaded head to the embeddings on loading. `tied` is from
    `discovery.skeleton.tied_head`. Returns the modules whose `weight` is the head's table; none if the head stays with
    the tenant."""
    tables = []
    for parameter, source in tied.items():
        owner, _, leaf = parameter.rpartition(".")
        head = model.get_submodule(owner)
        if isinstance(head, RemoteLayer):
            del model.all_tied_weights_keys[parameter]
            if leaf == "weight":
                tables.append(model.get_submodule(source.rpartition(".")[0]))
                head.register_forward_pre_hook(_Unchanged(tables[-1]))
    return tables


class _Unchanged:
    """Hook before the head's product: refuses a table that differs from that of the checkpoint."""

    def __init__(self, table: nn.Module) -> None:
        self._table = table

    def __call__(self, head: Any, _: Any) -> None:
        weight = self._table.weight
        if weight.requires_grad or weight.shape != head.weight.shape:
            raise UnsupportedMethodError(
                "the embedding table is also the LM head, whose product is offloaded, so the table cannot be trained "
                "or resized. Freeze it: model.get_input_embeddings().weight.requires_grad_(False); or load the model "
                "with RemoteConfig(tied_head=False)"
            )
