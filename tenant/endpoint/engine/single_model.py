"""Forward passes over one sequence at a time, with transformers' own cache: for models that `PackedModel` does not
support, such as hybrids, whose layers keep states. And the choice between both."""

import inspect
import logging
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from transformers import DynamicCache

from symbiosis_priv.errors import SymbiosisError, UnsupportedModelError
from tenant.endpoint.engine.kv import KeyValues, Shape
from tenant.endpoint.engine.packed_model import LONGEST, NextTokens, Output, PackedModel
from tenant.model.loading import shortened
from tenant.tasks import Tasks
from tenant.training.corpus import context_of

log = logging.getLogger(__name__)

_PROBE = 12  # tokens
_TOLERANCE = 0.05  # share of the largest logit: rounding stays below, and a wrong position is far above


class _OwnCache(KeyValues):
    """The model's own cache of a sequence, which is not shortened. It has no blocks here."""

    cache: Any = None


class SingleModel(PackedModel):
    """A model that computes one sequence after the other: its prompt in one pass, then token by token."""

    together = False

    def __init__(self, model: Any, tasks: Tasks | None = None) -> None:
        self.model, self.tasks = model, tasks
        self.hides_answers = False
        self.config = model.config.get_text_config(decoder=True)
        self.context = context_of(self.config) or LONGEST
        self.vocabulary = model.get_input_embeddings().num_embeddings
        self.shape = Shape(windows=(), heads=0, key_width=0, value_width=0, dtype=model.dtype)
        names = inspect.signature(model.forward).parameters
        self._name = next((name for name in ("past_key_values", "cache_params", "state") if name in names), "")
        self._cuts = "logits_to_keep" in names

    def close(self) -> None:
        """The model is as it was."""

    def new_kv(self) -> KeyValues:
        return _OwnCache(self.shape)

    @torch.no_grad()
    def __call__(self, rows: Sequence[NextTokens]) -> list[Output]:
        return [self._computed(part) for part in rows]

    def _computed(self, part: NextTokens) -> Output:
        kv = part.kv
        assert isinstance(kv, _OwnCache)
        if kv.cache is None and self._name == "past_key_values":
            kv.cache = DynamicCache(config=self.config)
        options = {"use_cache": True, self._name: kv.cache}
        if self._cuts:
            options["logits_to_keep"] = max(1, part.logits)
        ids = torch.tensor([part.tokens], dtype=torch.long, device=self.model.device)
        tasks, adapter = self.tasks, part.adapter
        with nullcontext() if tasks is None or adapter is None else tasks.batch([adapter]):
            if part.pooled:  # the whole prompt, and nothing follows
                hidden = self.model.base_model(input_ids=ids).last_hidden_state[0]
                kv.grow(len(part.tokens))
                return Output(hidden[:0], hidden)
            output = self.model(input_ids=ids, **options)
        kv.cache = output[self._name]
        kv.grow(len(part.tokens))
        logits = output.logits[0]
        return Output(logits[len(logits) - part.logits :], logits[:0])


def open_packed(model: Any, tasks: Tasks | None = None) -> PackedModel:
    """Return the model for an engine: `PackedModel`, or `SingleModel` if that is not supported; the choice and its
    reason are logged. Raises `UnsupportedModelError`: neither computes what the model itself computes."""
    try:
        return _probed(PackedModel, model, tasks)
    except UnsupportedModelError as error:
        log.warning("%s: one request at a time, because %s", type(model).__name__, error)
    try:
        return _probed(SingleModel, model, tasks)
    except UnsupportedModelError as error:
        raise UnsupportedModelError(
            f"{type(model).__name__} cannot answer requests, because {error}; call model.generate()"
        ) from error


def _probed(kind: type[PackedModel], model: Any, tasks: Tasks | None) -> PackedModel:
    """Compare a few tokens with the model's own pass."""
    packed, last = None, 2 if kind.together else 1
    try:
        packed = kind(model, tasks)
        tokens = [7 * i % packed.vocabulary for i in range(1, _PROBE + 1)]
        with torch.no_grad():
            own = model(input_ids=torch.tensor([tokens], dtype=torch.long, device=model.device), use_cache=False)
        kv = packed.new_kv()
        packed([NextTokens(kv=kv, tokens=tokens[:-last], logits=0)])
        ((logits, _), _) = packed(
            [NextTokens(kv=kv, tokens=tokens[-last:], logits=last), NextTokens(kv=packed.new_kv(), tokens=[1])]
        )
        expected = own.logits[0, -last:].float()
        if not (logits.float() - expected).abs().max() <= _TOLERANCE * expected.abs().max():
            raise UnsupportedModelError("its tokens computed one by one differ from its own pass")
    except BaseException as error:
        if packed is not None:
            packed.close()
        if isinstance(error, SymbiosisError) or not isinstance(error, Exception):
            raise
        raise UnsupportedModelError(f"its code fails on single tokens ({shortened(error)})") from error
    return packed
