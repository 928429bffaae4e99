"""Chooses the engine for a model, when it is loaded."""

import logging
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from symbiosis_priv.errors import ConfigError, SymbiosisError, UnsupportedModelError, one_line
from tenant.endpoint.engine.continuous import ContinuousEngine, EngineLimits
from tenant.endpoint.engine.packed_model import NextTokens, PackedModel
from tenant.endpoint.engine.requests import Engine
from tenant.endpoint.engine.sequence import Drafter
from tenant.endpoint.engine.sequential import SequentialEngine
from tenant.tasks import Tasks

log = logging.getLogger(__name__)

_PROBE = 12  # tokens
_TOLERANCE = 0.05  # share of the largest logit: rounding stays below, and a wrong position is far above


def open_engine(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    *,
    tasks: Tasks | None = None,
    limits: EngineLimits | None = None,
    drafter: Drafter | None = None,
) -> Engine:
    """Open the engine that computes all requests together; or, for a model that this engine does not support, the
    engine that calls `generate()` for each request. The choice and its reason are logged.

    Args:
        model: a split or whole model that predicts the next token, in evaluation mode.
        tasks: the adapters; None for none.
        drafter: guesses tokens to save round trips (`speculation`).

    Raises:
        ConfigError: there is a drafter, which the engine on `generate()` does not support.
        SymbiosisError: the model cannot generate: a provider fails, or its experts would show routes.
    """
    limits = limits or EngineLimits()
    try:
        packed = _probed(model, tasks)
    except UnsupportedModelError as error:
        if drafter is not None:
            raise ConfigError(
                f"guesses of tokens need an engine that cannot drive this model, because {error}; leave out --draft"
            ) from error
        log.warning("%s: one request at a time, because %s", type(model).__name__, error)
        return SequentialEngine(model, tokenizer, tasks=tasks, max_waiting=limits.waiting)
    log.info("%s: all requests together", type(model).__name__)
    return ContinuousEngine(packed, tokenizer, tasks=tasks, limits=limits, drafter=drafter)


def _probed(model: Any, tasks: Tasks | None) -> PackedModel:
    """Return the packed model, after comparing a few tokens with the model's own pass.

    Raises:
        UnsupportedModelError: the results differ, or `PackedModel` does not support the model.
    """
    packed = PackedModel(model, tasks)
    try:
        tokens = [7 * i % packed.vocabulary for i in range(1, _PROBE + 1)]
        with torch.no_grad():
            own = model(input_ids=torch.tensor([tokens], dtype=torch.long, device=model.device), use_cache=False)
        kv = packed.new_kv()
        packed([NextTokens(kv=kv, tokens=tokens[:-2], logits=0)])
        ((logits, _), _) = packed(
            [NextTokens(kv=kv, tokens=tokens[-2:], logits=2), NextTokens(kv=packed.new_kv(), tokens=[1])]
        )
        expected = own.logits[0, -2:].float()
        if not (logits.float() - expected).abs().max() <= _TOLERANCE * expected.abs().max():
            raise UnsupportedModelError("its tokens computed one by one differ from its own pass")
    except BaseException as error:
        packed.close()
        if isinstance(error, SymbiosisError) or not isinstance(error, Exception):
            raise
        raise UnsupportedModelError(f"its code fails on single tokens ({one_line(str(error))[:200]})") from error
    return packed
