"""Refuses to decode with experts = "counts": from the route of one token, a provider learns most tokens.

A published attack recovers 91 % of tokens from their routes alone (arXiv:2602.04105). A forward pass over many tokens
shows a sum of routes; a decoding step shows the route of one token.
"""

from typing import Any, NoReturn

import torch
from torch import Tensor
from transformers import PreTrainedModel

from symbiosis_priv.errors import UnsupportedMethodError


def refuse_decoding(model: PreTrainedModel) -> None:
    """Make `generate`, continuous batching and single decoding steps of a model raise an error."""
    vars(model)["generate"] = vars(model)["init_continuous_batching"] = _refuse  # `generate_batch` calls the second
    for part in {model, model.base_model}:  # PEFT calls the forward pass of the model without its hooks
        part.register_forward_pre_hook(_refuse_step, with_kwargs=True)


def _refuse_step(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Hook: refuse a pass over one token per sequence, a pass of continuous batching (with `cache`), and, without
    gradients, a pass with filled `past_key_values` (prefix tuning trains with them)."""
    inputs = [kwargs.get("input_ids"), kwargs.get("inputs_embeds"), *args[:1]]
    continues = not torch.is_grad_enabled() and _is_filled(kwargs.get("past_key_values"))
    if continues or kwargs.get("cache") is not None or any(isinstance(x, Tensor) and x.shape[1] == 1 for x in inputs):
        _refuse()


def _is_filled(cache: Any) -> bool:
    """Returns True unless a cache is known to be empty; caches of linear attention have no length."""
    try:
        return cache is not None and cache.get_seq_length() > 0
    except ValueError:
        return True


def _refuse(*_: Any, **__: Any) -> NoReturn:
    raise UnsupportedMethodError(
        "experts = 'counts' shows providers the experts of every token, which reveals most of the decoded text "
        "(docs/experts.md). Generate with RemoteConfig(experts='all'), 'flat' or 'local'; or accept it with "
        "RemoteConfig(experts='counts', show_routes_while_decoding=True)"
    )
