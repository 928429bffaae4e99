"""The engine that computes all requests together. Requests join and leave at every token.

One thread repeats a step: end cancelled requests, admit requests that fit the memory, compute the next token of each
answer and as many tokens of prompts as the step's rows allow, and report. All rows of a step are one pass through the
model, so a step costs the round trips of one token for any number of requests.
"""

import logging
import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from transformers import PreTrainedTokenizerBase

from symbiosis_priv import errors
from symbiosis_priv.errors import ConfigError
from tenant.endpoint.engine.attention import ROWS
from tenant.endpoint.engine.kv import Prefixes
from tenant.endpoint.engine.packed_model import NextTokens, PackedModel
from tenant.endpoint.engine.queued import Engine, Turn, Turns
from tenant.endpoint.engine.requests import EngineRequest, ShownRow
from tenant.endpoint.engine.sequence import Sequence
from tenant.endpoint.engine.speculation import guess
from tenant.session.tally import look, taken_sight

log = logging.getLogger(__name__)

_PROVIDERS = (
    *(errors.TransportError, errors.ProviderError, errors.ProtocolError, errors.VerificationError),
    *(errors.QuarantinedError, errors.UncoveredError, errors.CertificateError),
)
"""Errors of providers, which dividing a step's rows would not avoid."""
_STEP_WORK = 20_000_000_000
"""Floating-point operations of a step for the attention of prompts while other requests run. The more tokens of a
prompt have been read, the fewer rows it gets, so that it does not delay other answers."""


_LOGITS = 1 << 30  # limit of the bytes of a prompt's logits, if it is read in one pass


@dataclass(frozen=True, kw_only=True)
class EngineLimits:
    """Limits of an engine.

    Args:
        memory: bytes of keys and values, of running requests at their full length and of the cache.
        step_rows: rows of a step. With more rows, prompts take fewer round trips, but delay the tokens of other
            answers.
        prompt_rows: minimum number of a step's rows for prompts, and number of rows that a prompt gets in one turn.
        running: limit of requests that run at the same time.
        waiting: limit of requests that wait. A client may have at most as many of them as stay free, so no client can
            take all places.
        pace_s: seconds from the beginning of a step to that of the next one; None for steps as fast as they can be.
            With a pace, every step has exactly `step_rows` rows, also while there is no request: rows without meaning
            fill it. Providers then see no difference between prompts, answers and nothing.
        clients: number of clients that share the engine. With several, a client's second request runs only if as many
            places and as much memory stay free as the client then uses.
    """

    memory: int = 1 << 30
    step_rows: int = 256
    prompt_rows: int = 64
    running: int = 128
    waiting: int = 512
    pace_s: float | None = None
    clients: int = 1


class ContinuousEngine(Engine):
    """The engine that computes all requests together; see the module's docstring. `ahead`: number of tokens that are
    guessed for a step of an answer, to save round trips."""

    def __init__(
        self,
        packed: PackedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        limits: EngineLimits = EngineLimits(),
        ahead: int = 0,
        turn: Turn | None = None,
    ) -> None:
        if not packed.together:
            if ahead or limits.pace_s is not None:
                raise ConfigError("this model is computed one request at a time; leave out --draft and --pace")
            limits = replace(limits, running=1, step_rows=packed.context, prompt_rows=packed.context)
        super().__init__(
            packed.model,
            tokenizer,
            tasks=packed.tasks,
            max_waiting=limits.waiting,
            context=packed.context,
            turn=turn,
        )
        self._packed, self._limits, self._ahead = packed, limits, ahead
        self._prefixes = Prefixes()
        shape = packed.shape
        self._due, self._late = time.monotonic(), 0
        if packed.together:
            width = packed.config.num_attention_heads * (shape.key_width + shape.value_width)
            self._pairs = _STEP_WORK // (2 * shape.layers * width)
        if limits.pace_s is not None:
            packed.hides_answers = True
            answers = min(limits.running, limits.step_rows // (1 + self._ahead))
            self._limits = replace(limits, running=answers, prompt_rows=limits.step_rows)
            with self._changed:
                self._idles = True
                self._changed.notify_all()

    def close(self, *, interrupt: Callable[[], None] | None = None) -> None:
        super().close(interrupt=interrupt)
        self._packed.close()

    def check(self, request: EngineRequest) -> None:
        super().check(request)
        if not self._packed.together:
            if request.bucket > 1:
                raise ConfigError(
                    "this model reads a prompt in its exact length; leave out --answer-bucket and answer_bucket"
                )
            logits = len(request.prompt) * self._packed.vocabulary * 4
            if request.sampling.prompt_logprobs is not None and logits > _LOGITS:
                raise ConfigError(
                    f"log probabilities of {len(request.prompt):,} tokens of prompt take {logits:,} bytes here, more "
                    f"than {_LOGITS:,}; ask for those of a shorter prompt"
                )
        if not request.prompt:
            raise ConfigError("the prompt has no tokens")
        if not 0 <= min(request.prompt) <= max(request.prompt) < self._packed.vocabulary:
            raise ConfigError(f"the prompt has token ids outside the vocabulary of {self._packed.vocabulary:,}")
        if (needed := self._bytes(request)) > self._limits.memory:
            raise ConfigError(
                f"{len(request.prompt):,} tokens of prompt and {request.max_tokens:,} new tokens need {needed:,} bytes "
                f"of keys and values, and the endpoint's limit is {self._limits.memory:,}; shorten the prompt or ask "
                f"for fewer"
            )

    def step(self) -> None:
        """End cancelled requests, admit others, and compute some rows."""
        for sequence in [one for one in self._running if one.is_over()]:
            self.end(sequence)
        self._admit()
        try:
            rows = self._next_rows()
            if self._limits.pace_s is not None:
                self._await_turn(self._limits.pace_s)
            self._compute(*rows)
        except Exception as error:  # an error in the engine must end all requests, which would wait forever
            log.exception("the engine failed")
            for sequence in list(self._running):
                self.end(sequence, error)

    def _await_turn(self, pace_s: float) -> None:
        """Wait for the time of the next step. All that depends on requests, such as choosing tokens, comes before."""
        if (late := time.monotonic() - self._due) > 0 and self._steps:
            self._late += 1
            log.log(
                logging.WARNING if self._late == 1 else logging.DEBUG,
                "a step came %.0f ms after its time, which providers see; choose a larger --pace",
                1000 * late,
            )
            self._due += math.ceil(late / pace_s) * pace_s
        with self._changed:
            self._changed.wait_for(self._is_done, timeout=max(0.0, self._due - time.monotonic()))
        self._due += pace_s

    def _admit(self) -> None:
        """Start waiting requests until the keys and values of the next one do not fit."""
        while len(self._running) < self._limits.running:
            with self._changed:
                sequence = next((one for one in self._waiting.firsts() if self._leaves_room(one)), None)
            if sequence is None:
                return
            request = sequence.request
            needed = self._bytes(request) + self._reserved()
            if needed > self._limits.memory:
                return
            while needed + self._prefixes.bytes > self._limits.memory and self._prefixes.drop_one():
                pass
            try:
                if request.adapter is not None and self._tasks is not None:
                    sequence.generation = sequence.held.enter_context(self._tasks.hold(request.adapter))
                known = None
                if not self._packed.together:
                    sequence.generation = None
                if not sequence.reads_all and sequence.generation is not None:
                    # the last token is always computed, because its logits are needed
                    known = self._prefixes.find(_owner(sequence), request.prompt[:-1])
                sequence.kv = known or self._packed.new_kv()
                sequence.kv.release()
            except Exception as error:  # an adapter that cannot be loaded
                self.end(sequence, error)
                continue
            sequence.charge(cached_tokens=sequence.kv.length)
            with self._changed:
                if sequence in self._waiting:
                    self._waiting.remove(sequence)
                    self._running.add(sequence)
                else:  # it was cancelled meanwhile
                    self.end(sequence)

    def _leaves_room(self, sequence: Sequence) -> bool:
        """Return whether the client would leave enough places and memory to others."""
        own = [one for one in self._running if one.request.client == sequence.request.client]
        if self._limits.clients == 1 or not own:
            return True
        places, memory = len(own) + 1, sum(self._bytes(one.request) for one in (*own, sequence))
        free_places, free = self._limits.running - len(self._running) - 1, self._limits.memory - self._reserved()
        return places <= free_places and memory <= free - self._bytes(sequence.request)

    def _next_rows(self) -> tuple[list[tuple[Sequence, NextTokens]], int, int]:
        """Choose the rows of a step: the next token of each answer, then tokens of prompts, which take turns. Returns
        also the number of rows without meaning that fill the prompts' buckets, or a step with a pace; and how many of
        them need logits, because those of the prompt do."""
        ahead = self._ahead
        chosen = [(s, s.rows(1, guess(s.tokens, ahead) if ahead else ())) for s in self._running if s.decoding]
        free = self._limits.step_rows - sum(len(rows.tokens) for _, rows in chosen)
        paced = self._limits.pace_s is not None
        if not paced:
            free = max(free, self._limits.prompt_rows)
        pairs = self._pairs if len(self._running) > 1 else sys.maxsize
        fill, scored, shares = 0, 0, dict[Sequence, int]()
        reading = Turns(s for s in self._running if not s.decoding)
        while free > 0 and (pairs > 0 or not shares) and (sequence := reading.first()) is not None:
            assert sequence.kv is not None
            had = shares.get(sequence, 0)
            done = sequence.kv.length + had
            left = len(sequence.tokens) - done
            # with buckets, what is sent must not depend on the exact numbers of tokens
            unit = 1 if paced else min(sequence.request.bucket, self._limits.prompt_rows)
            most = min(self._limits.prompt_rows, free, max(ROWS, pairs // (done // unit * unit + 1)))
            share = min(max(most // unit, 1) * unit, left + -left % unit)
            shares[sequence] = had + min(share, left)
            fill += max(0, share - left)
            scored += max(0, share - left) * (sequence.request.sampling.prompt_logprobs is not None)
            free -= share
            pairs -= share * done
            reading.remove(sequence)
            if share < left:
                reading.add(sequence)
        with self._changed:
            for sequence in shares:  # in the next step, other prompts come first
                self._running.remove(sequence)
                self._running.add(sequence)
        chosen += [(sequence, sequence.rows(share)) for sequence, share in shares.items()]
        return chosen, free if paced else fill, scored

    def _compute(self, chosen: list[tuple[Sequence, NextTokens]], fill: int = 0, scored: int = 0) -> None:
        """Compute some rows. After an error that a single request may cause, compute each request alone. `fill`: number
        of further rows, of a sequence without meaning, of which `scored` need logits."""
        if not chosen and not fill:
            return
        if len(chosen) == 1 and chosen[0][0].request.shows_row and chosen[0][0].decoding:
            look()  # only alone: among rows of others, the first row may be another client's
        try:
            try:
                filler = [NextTokens(kv=self._packed.new_kv(), tokens=[0] * fill, logits=scored)] if fill else []
                outputs = self._packed([*(rows for _, rows in chosen), *filler])[: len(chosen)]
            finally:
                self._steps += 1
                if chosen and (seen := taken_sight()) is not None:
                    hidden, saw = map(tuple, seen)
                    chosen[0][0].row = ShownRow(hidden=hidden, saw=saw)
                self.charge([sequence for sequence, _ in chosen], [len(rows.tokens) for _, rows in chosen])
        except Exception as error:
            if len(chosen) > 1 and not isinstance(error, _PROVIDERS):
                for one in chosen:
                    self._compute([one])
                return
            if not chosen:
                log.warning("a step without requests has failed: %s", type(error).__name__)
            for sequence, _ in chosen:
                self.end(sequence, error)
            return
        for (sequence, rows), output in zip(chosen, outputs, strict=True):
            try:
                sequence.take(rows, output)
            except Exception as error:  # no token has a probability, or a grammar fails
                self.end(sequence, error)
                continue
            if sequence.is_over():
                self.end(sequence)
            elif sequence.kv is not None:
                sequence.kv.release()

    def end(self, sequence: Sequence, error: Exception | None = None) -> None:
        if sequence.kv is not None and error is None and sequence.generation is not None:
            self._prefixes.keep(_owner(sequence), sequence.tokens[: sequence.kv.length], sequence.kv)
        super().end(sequence, error)

    def _reserved(self) -> int:
        return sum(self._bytes(sequence.request) for sequence in self._running)

    def _bytes(self, request: EngineRequest) -> int:
        """Return the largest memory of a sequence: at its full length, with a guess."""
        length = request.full_length + self._ahead
        step = max(self._limits.step_rows, self._limits.prompt_rows, self._ahead + 1)
        return self._packed.shape.bytes(length, step=step)


def _owner(sequence: Sequence) -> tuple[object, ...]:
    """Return the key of the cached prefixes that a request may use; see `Prefixes`."""
    return sequence.request.client, sequence.request.adapter, sequence.generation
