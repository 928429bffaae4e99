"""Where the experts of a mixture run (`RemoteConfig(experts=...)`), and which mode is the default."""

import logging
import math
from collections.abc import Collection, Sequence
from typing import Any

from transformers import PreTrainedModel

from symbiosis_priv.checkpoints.discovery.linears import experts_of
from symbiosis_priv.checkpoints.manifest import GroupEntry
from symbiosis_priv.errors import UnsupportedModelError
from tenant.options import Experts

log = logging.getLogger(__name__)

SMALL_FACTOR = 4
"""Largest cost (experts per chosen expert) at which "all" is the default. Mixtral costs 4, gpt-oss-20b 8, Qwen3-30B-A3B
16."""

_CHOSEN = ("num_experts_per_tok", "top_k_experts", "moe_topk", "moe_top_k")
"""Configuration fields that hold the number of experts per token."""


def choose_mode(model: PreTrainedModel, entries: Sequence[GroupEntry], wanted: Experts | None) -> Experts:
    """Choose where the experts of a model run, and log the choice and its cost. `wanted` is the user's choice, or None.
    Raises `UnsupportedModelError` if the model has no experts, or providers do not serve those that the choice
    offloads."""
    experts = experts_of(model)
    if not experts:
        if wanted not in (None, "local"):
            raise UnsupportedModelError(
                f"experts = {wanted!r} is for mixtures of experts, and {type(model).__name__} has none; leave it out"
            )
        return "local"
    served = {entry.members[0].rpartition(".")[0] for entry in entries if entry.experts > 1}
    staying = [name for name in experts if not _is_in(name, served)]
    if staying and wanted not in (None, "local"):
        kind = type(experts[staying[0]]).__name__
        raise UnsupportedModelError(
            f"experts = {wanted!r} is not possible: the providers do not serve {staying[0]} ({kind}). Choose "
            f"RemoteConfig(experts='local'), which keeps experts here"
        )
    mode: Experts
    if staying:
        mode, reason = "local", "providers do not serve these experts"
    else:
        price = max(_price(module) for module in experts.values())
        mode = wanted or ("all" if price <= SMALL_FACTOR else "local")
        reason = f"sending every row to every expert (experts='all') costs x{price:.3g} products and bytes"
    size = sum(p.numel() * p.element_size() for module in experts.values() for p in module.parameters()) / 2**30
    here = f". The experts take {size:.1f} GiB of memory here" if mode == "local" else ""
    log.info("%d layers of experts: experts=%r; %s%s", len(experts), mode, reason, here)
    if mode == "counts":
        log.warning("experts='counts': providers see how many rows of each request go to each expert (docs/experts.md)")
    return mode


def _is_in(name: str, served: Collection[str]) -> bool:
    """Returns True if a module is in `served`, whose names may lack the base model's prefix or have another one."""
    return any(name == other or name.endswith(f".{other}") or other.endswith(f".{name}") for other in served)


def _price(experts: Any) -> float:
    """Return experts per chosen expert; infinite if the configuration lacks the number of chosen experts."""
    chosen = next((getattr(experts.config, n) for n in _CHOSEN if hasattr(experts.config, n)), None)
    return experts.num_experts / chosen if isinstance(chosen, int) and chosen else math.inf
