"""The engine for models that classify texts: those that wait share a pass, each row with its own task."""

from collections.abc import Sequence as Ordered
from typing import Any, Final

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from symbiosis_priv.errors import ConfigError, NonFiniteError
from tenant.endpoint.engine.queued import Engine
from tenant.endpoint.engine.requests import EngineRequest
from tenant.endpoint.engine.sequence import Sequence
from tenant.tasks import Tasks
from tenant.tasks.batch import BASE
from tenant.training.corpus import context_of

_MOST: Final = 32  # texts of a pass
_WAITING: Final = 512  # texts that wait
_TOKENS: Final = 16_384  # ... and their tokens, with padding
_BLOCK: Final = 8  # rows of a task that are computed together, so that its bits do not depend on other tasks
TYPES: Final = "token_type_ids"


class ClassifyingEngine(Engine):
    """Computes the logits of texts; clients take turns. A text that fails in company is computed again alone, so that
    no request fails for another one."""

    def __init__(self, model: Any, tokenizer: PreTrainedTokenizerBase, *, tasks: Tasks | None) -> None:
        context = min(context_of(model.config) or 1 << 20, int(tokenizer.model_max_length))
        super().__init__(model, tokenizer, tasks=tasks, max_waiting=_WAITING, context=context)
        self._pad_token_id: int | None = model.config.pad_token_id

    def check(self, request: EngineRequest) -> None:
        if request.pooling != "logits":
            raise ConfigError("this model classifies texts and generates none; use /classify, /score or /rerank")
        super().check(request)

    def step(self) -> None:
        """Compute the next texts in turn."""
        with self._changed:
            chosen = list[Sequence]()
            while (one := self._next(chosen)) is not None:
                self._waiting.remove(one)
                self._running.add(one)
                chosen.append(one)
        self._turn.counted = self._counters()
        try:
            self._answer(chosen)
        except Exception as error:
            if len(chosen) == 1:
                self.end(chosen[0], error)
                return
            for one in chosen:
                try:
                    self._answer([one])
                except Exception as own:
                    self.end(one, own)

    def _next(self, chosen: Ordered[Sequence]) -> Sequence | None:
        """Return the next text in turn if it fits into a pass with those that were chosen."""
        one = self._waiting.first()
        if one is None or not chosen:
            return one
        longest = max(len(each.request.prompt) for each in (one, *chosen))
        return one if len(chosen) < _MOST and longest * (len(chosen) + 1) <= _TOKENS else None

    def _answer(self, chosen: Ordered[Sequence]) -> None:
        logits = self._logits([one.request for one in chosen])
        self._steps += 1
        self.charge(chosen, [len(one.request.prompt) for one in chosen])
        for one, row in zip(chosen, logits, strict=True):
            if not bool(row.isfinite().all()):
                self.end(one, NonFiniteError())
                continue
            one.embedded(row)
            self.end(one)

    @torch.no_grad()
    def _logits(self, requests: Ordered[EngineRequest]) -> list[Tensor]:
        """Return the logits `[labels]` of each text."""
        names = [BASE if one.adapter is None else one.adapter for one in requests]
        used = {token for one in requests for token in one.prompt}
        # decoders read the last token that is not padding, so padding is a token of no text
        pad = self._pad_token_id
        if pad is None:
            pad = self._model.config.pad_token_id = next(token for token in range(len(used) + 1) if token not in used)
        bucket = max(one.bucket for one in requests)
        width = min(-(-max(len(one.prompt) for one in requests) // bucket) * bucket, self.context)
        given = {
            "input_ids": _padded([one.prompt for one in requests], pad, width),
            "attention_mask": _padded([[1] * len(one.prompt) for one in requests], 0, width),
        }
        if any(one.types for one in requests):
            given[TYPES] = _padded([one.types or [0] * len(one.prompt) for one in requests], 0, width)
        given = {name: tensor.to(self._model.device) for name, tensor in given.items()}
        if self._tasks is None:
            return list(self._model(**given).logits)
        with self._tasks.batch(names, block=_BLOCK):
            return list(self._model(**given).logits)


def _padded(rows: Ordered[Ordered[int]], value: int, width: int) -> Tensor:
    return torch.tensor([[*row, *[value] * (width - len(row))] for row in rows], dtype=torch.long, device="cpu")
