"""One request in progress: its tokens, keys and values, answer and costs."""

from abc import ABC, abstractmethod
from collections.abc import Collection, Container
from collections.abc import Sequence as Tokens
from contextlib import ExitStack
from dataclasses import fields
from typing import Any

from torch import Tensor

from symbiosis_priv.errors import SymbiosisError, TaskError
from tenant.endpoint.engine.answer import GeneratedAnswer
from tenant.endpoint.engine.kv import KeyValues
from tenant.endpoint.engine.packed_model import NextTokens, Output
from tenant.endpoint.engine.requests import EngineRequest, RequestLedger, TokenLogprob
from tenant.endpoint.engine.sampling import token_logprob
from tenant.model.ledger import ledger_of
from tenant.session.tally import Ledger
from tenant.training.corpus import check_context


class Drafter(ABC):
    """Guesses the next tokens of sequences, so that one pass may yield several tokens.

    Attributes:
        ahead: number of tokens of a guess.
    """

    ahead: int

    @abstractmethod
    def draft(self, sequences: Collection["Sequence"]) -> dict["Sequence", list[int]]:
        """Return a guess for each sequence whose prompt has been read.

        A guess always has `ahead` tokens, because executors see the number of rows.
        """

    def bytes(self, tokens: int) -> int:
        """Return the bytes that the drafter needs for a sequence of `tokens` tokens."""
        return 0


class Sequence:
    """A request in progress, and its `Handle`.

    Args:
        answer: chooses and reports the tokens.

    Attributes:
        tokens: the prompt, and the tokens chosen so far.
        kv: keys and values of the tokens computed so far; None until the request is admitted.
        held: contexts that end with the request: the use of its adapter.
        generation: number of the adapter's load; None if the adapter may change.
        cancelled: True after the request was cancelled.
    """

    def __init__(self, answer: GeneratedAnswer) -> None:
        self.answer = answer
        self.tokens = list(answer.request.prompt)
        self.kv: KeyValues | None = None
        self.held = ExitStack()
        self.generation: int | None = 0
        self.cancelled = False
        self._spent = RequestLedger()
        self._prompt_logprobs: list[TokenLogprob | None] = [None]
        self._sum: Tensor | None = None

    @property
    def request(self) -> EngineRequest:
        return self.answer.request

    @property
    def decoding(self) -> bool:
        """True if the prompt has been read."""
        return self.kv is not None and self.kv.length >= len(self.request.prompt)

    @property
    def reads_all(self) -> bool:
        """True if the results of every token of the prompt are needed, so that no cached prefix can be used."""
        return self.request.pooling == "mean" or self.request.sampling.prompt_logprobs is not None

    def cancel(self) -> None:
        self.cancelled = True

    def ledger(self) -> RequestLedger:
        return self._spent

    def rows(self, most: int, guess: Tokens[int] = ()) -> NextTokens:
        """Return the tokens to compute next: up to `most` of the prompt, or the last token and the guess after it."""
        assert self.kv is not None
        done = self.kv.length
        if self.decoding:
            tokens = [self.tokens[-1], *guess]
            logits = len(tokens)
        else:
            tokens = self.tokens[done : done + most]
            reads = self.request.sampling.prompt_logprobs is not None
            logits = len(tokens) if reads else int(done + len(tokens) == len(self.tokens))
        return NextTokens(kv=self.kv, tokens=tokens, adapter=self.request.adapter, logits=logits)

    def take(self, rows: NextTokens, output: Output) -> int:
        """Process the results of `rows`. Returns the number of new tokens."""
        assert self.kv is not None
        done = self.kv.length
        if len(self.tokens) > len(self.request.prompt):
            return self._extend(rows, output.logits)
        self._read(output, done - len(rows.tokens))
        if done < len(self.tokens):
            return 0
        if self.request.pooling is not None:
            self.answer.embedded(output.hidden[-1] if self._sum is None else (self._sum / done))
            return 0
        self.answer.start(self._prompt_logprobs if self.request.sampling.prompt_logprobs is not None else ())
        if self.answer.finish is not None:
            return 0
        self.tokens.append(self.answer.add(output.logits[-1]))
        return 1

    def charge(self, spent: RequestLedger) -> None:
        """Add costs to the ledger of this request."""
        self._spent = _sum(self._spent, spent)

    def _read(self, output: Output, start: int) -> None:
        top = self.request.sampling.prompt_logprobs
        if top is not None:
            following = self.tokens[start + 1 : start + 1 + len(output.logits)]
            pairs = zip(output.logits, following, strict=False)  # the last token of the prompt has no following token
            self._prompt_logprobs += [token_logprob(row, token, top=top) for row, token in pairs]
        if self.request.pooling == "mean":
            # in order, so that the sum does not depend on the division of the prompt
            for row in output.hidden.double():
                self._sum = row if self._sum is None else self._sum + row

    def _extend(self, rows: NextTokens, logits: Tensor) -> int:
        """Choose tokens from the logits of the last token and of the guess, as long as the guess is right."""
        assert self.kv is not None
        before = len(self.tokens)
        for row, guess in zip(logits, [*rows.tokens[1:], None], strict=True):
            self.tokens.append(self.answer.add(row))
            if self.answer.finish is not None or self.tokens[-1] != guess:
                break
        self.kv.truncate(len(self.tokens) - 1)
        return len(self.tokens) - before


def full_length(request: EngineRequest) -> int:
    """Return the largest number of tokens of a request, including its prompt."""
    return len(request.prompt) + request.max_tokens * (request.pooling is None)


def sizes(request: EngineRequest) -> str:
    """Describe the length of a request, for errors."""
    return f"{len(request.prompt):,} tokens of prompt and {request.max_tokens:,} new tokens"


def check(request: EngineRequest, *, adapters: Container[str], context: int | None) -> None:
    """Refuse a request that the model cannot serve.

    Raises:
        TaskError: there is no such adapter.
        ConfigError: the request is longer than the context.
    """
    if request.adapter is not None and request.adapter not in adapters:
        raise TaskError(f"there is no adapter {request.adapter[:80]!a}; register it first")
    check_context(context, prompt=len(request.prompt), new=full_length(request) - len(request.prompt))


def counters(model: Any) -> Ledger:
    """Return the counters of a model's session; zeros without one."""
    try:
        return ledger_of(model) or Ledger()
    except SymbiosisError:  # a model that is not split
        return Ledger()


def costs(spent: Ledger) -> RequestLedger:
    """Return what a session has spent as the costs of a request."""
    return RequestLedger(
        rows=spent.rows,
        round_trips=spent.executor_round_trips,
        answers_verified=spent.answers_verified,
        answers_rejected=spent.answers_rejected,
        bytes_up=spent.bytes_to_executors + spent.bytes_to_helpers,
        bytes_down=spent.bytes_from_executors + spent.bytes_from_helpers,
    )


def charge(sequences: Tokens[Sequence], rows: Tokens[int], spent: Ledger) -> None:
    """Divide the costs of a step among its sequences by their rows, without remainder."""
    amounts = vars(costs(spent)).copy()
    round_trips = amounts.pop("round_trips")  # each round trip carries rows of all sequences
    done, every = 0, sum(rows)
    for sequence, own in zip(sequences, rows, strict=True):
        part = {name: n * (done + own) // every - n * done // every for name, n in amounts.items()}
        sequence.charge(RequestLedger(**part, round_trips=round_trips))
        done += own


def _sum(one: RequestLedger, other: RequestLedger) -> RequestLedger:
    return RequestLedger(**{f.name: getattr(one, f.name) + getattr(other, f.name) for f in fields(RequestLedger)})
