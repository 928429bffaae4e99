"""The engine for models that `PackedModel` does not support, and the choice of engines."""

import copy
import logging
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedTokenizerBase,
    StoppingCriteria,
    StoppingCriteriaList,
)

from symbiosis_priv.errors import ConfigError, SymbiosisError, UnsupportedModelError
from tenant.endpoint.engine.answer import token_logprob
from tenant.endpoint.engine.continuous import ContinuousEngine, EngineLimits
from tenant.endpoint.engine.packed_model import NextTokens, PackedModel
from tenant.endpoint.engine.queued import Engine, Turn
from tenant.endpoint.engine.requests import EngineRequest
from tenant.endpoint.engine.sequence import Sequence
from tenant.model.loading import shortened
from tenant.session.tally import look, taken_sight
from tenant.tasks import Tasks
from tenant.training.corpus import context_of

log = logging.getLogger(__name__)

_LOGITS = 1 << 30  # limit of the bytes of a prompt's logits
_PROBE = 12  # tokens
_TOLERANCE = 0.05  # share of the largest logit: rounding stays below, and a wrong position is far above


class SequentialEngine(Engine):
    """Answers one request at a time, with `model.generate()`; clients take turns. After each token, another engine of
    the model has its turn. `max_waiting`: limit of requests that wait. A client may have at most as many of them as
    stay free. `turn`: shared with other engines of the model; None for none."""

    def __init__(
        self,
        model: Any,
        tokenizer: PreTrainedTokenizerBase,
        *,
        tasks: Tasks | None = None,
        max_waiting: int = 64,
        turn: Turn | None = None,
    ) -> None:
        model = copy.copy(model)  # has its own generation settings and shares the layers
        model.generation_config = GenerationConfig()
        context = context_of(model.config)
        super().__init__(model, tokenizer, tasks=tasks, max_waiting=max_waiting, context=context, turn=turn)

    def check(self, request: EngineRequest) -> None:
        super().check(request)
        if request.bucket > 1:
            raise ConfigError(
                "this request is answered with generate(), whose prompt is sent in its exact length; leave out "
                "--answer-bucket and answer_bucket"
            )
        logits = len(request.prompt) * self._model.config.get_text_config().vocab_size * 4
        if request.sampling.prompt_logprobs is not None and logits > _LOGITS:
            raise ConfigError(
                f"log probabilities of {len(request.prompt):,} tokens of prompt take {logits:,} bytes here, more than "
                f"{_LOGITS:,}; ask for those of a shorter prompt"
            )

    def step(self) -> None:
        """Answer the next request."""
        with self._changed:
            if (sequence := self._waiting.first()) is None:
                return
            self._waiting.remove(sequence)
            self._running.add(sequence)
        self._turn.counted = self._counters()
        try:
            self._answer(sequence)
        except Exception as error:
            self.end(sequence, error)
        else:
            self.charge([sequence], [1])
            self.end(sequence)
        finally:
            taken_sight()

    def _answer(self, sequence: Sequence) -> None:
        request = sequence.request
        if sequence.is_over():
            return
        batch = (
            nullcontext() if self._tasks is None or request.adapter is None else self._tasks.batch([request.adapter])
        )
        ids = torch.tensor([request.prompt], dtype=torch.long, device=self._model.device)
        given = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        with batch, torch.no_grad():
            if request.pooling is not None:
                hidden = self._model.base_model(**given).last_hidden_state[0]
                sequence.embedded(hidden[-1] if request.pooling == "last" else hidden.float().mean(dim=0))
                return
            logprobs = []
            if (top := request.sampling.prompt_logprobs) is not None:
                pairs = zip(self._model(**given).logits[0], request.prompt[1:], strict=False)
                logprobs = [None, *(token_logprob(row, token, top=top) for row, token in pairs)]
            sequence.start(logprobs)
            if sequence.finish is None:
                self._model.generate(
                    **given,
                    generation_config=GenerationConfig(max_new_tokens=request.max_tokens, do_sample=False),
                    logits_processor=LogitsProcessorList([_Steps(sequence, self)]),
                    stopping_criteria=StoppingCriteriaList([_Ended(sequence)]),
                )

    def choose(self, sequence: Sequence, logits: Tensor) -> int:
        """Count a token and its costs, choose the token, and let another engine have its turn."""
        self._steps += 1
        self.charge([sequence], [1])
        self.keep_row(sequence)
        if sequence.request.shows_row:
            look()  # the next pass is of one token
        self._tokens += 1
        token = sequence.add(logits)
        sequence.passed()
        self._turn.pass_on()
        return token


class _Steps(LogitsProcessor):
    """Lets the request's own sampler choose each token: the only token that `generate()` can choose."""

    def __init__(self, sequence: Sequence, engine: SequentialEngine) -> None:
        self._sequence, self._engine = sequence, engine

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if self._sequence.is_over():
            return scores  # on a GPU, `generate()` calls `_Ended` one token late
        only = torch.full_like(scores, -torch.inf)
        only[0, self._engine.choose(self._sequence, scores[0])] = 0.0
        return only


class _Ended(StoppingCriteria):
    def __init__(self, sequence: Sequence) -> None:
        self._sequence = sequence

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        return torch.full((len(input_ids),), self._sequence.is_over(), dtype=torch.bool, device=input_ids.device)


def open_engine(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    *,
    tasks: Tasks | None = None,
    limits: EngineLimits | None = None,
    ahead: int = 0,
    turn: Turn | None = None,
) -> Engine:
    """Open the engine that computes all requests together; or, for a model that this engine does not support, the
    engine that calls `generate()` for each request. The choice and its reason are logged. `ahead`: number of
    tokens that are guessed for a step (`speculation`). Raises `ConfigError`: there are guesses or a pace, which the engine on
    `generate()` does not support; `SymbiosisError`: the model cannot generate, because a provider fails."""
    limits = limits or EngineLimits()
    try:
        packed = _probed(model, tasks)
    except UnsupportedModelError as error:
        if ahead or limits.pace_s is not None:
            what, option = ("guesses of tokens need", "--draft") if ahead else ("a pace needs", "--pace")
            raise ConfigError(
                f"{what} an engine that cannot drive this model, because {error}; leave out {option}"
            ) from error
        log.warning("%s: one request at a time, because %s", type(model).__name__, error)
        return SequentialEngine(model, tokenizer, tasks=tasks, max_waiting=limits.waiting, turn=turn)
    log.info("%s: all requests together", type(model).__name__)
    return ContinuousEngine(packed, tokenizer, tasks=tasks, limits=limits, ahead=ahead, turn=turn)


def _probed(model: Any, tasks: Tasks | None) -> PackedModel:
    """Return the packed model, after comparing a few tokens with the model's own pass. Raises `UnsupportedModelError`
    if the results differ, or `PackedModel` does not support the model."""
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
        raise UnsupportedModelError(f"its code fails on single tokens ({shortened(error)})") from error
    return packed
