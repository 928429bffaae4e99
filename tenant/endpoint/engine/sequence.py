"""One request in progress: its tokens, keys and values, answer and costs."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from collections.abc import Sequence as Tokens
from contextlib import ExitStack

from torch import Tensor

from tenant.endpoint.engine.answer import GeneratedAnswer, token_logprob
from tenant.endpoint.engine.kv import KeyValues
from tenant.endpoint.engine.packed_model import NextTokens, Output
from tenant.endpoint.engine.requests import EngineRequest, RequestLedger, TokenLogprob


class Drafter(ABC):
    """Guesses the next tokens of sequences, so that one pass may yield several tokens. `ahead`: number of tokens of a
    guess."""

    ahead: int

    @abstractmethod
    def draft(self, sequences: Collection["Sequence"]) -> dict["Sequence", list[int]]:
        """Return a guess for each sequence whose prompt has been read. A guess always has `ahead` tokens, because
        executors see the number of rows."""

    def bytes(self, tokens: int) -> int:
        """Return the bytes that the drafter needs for a sequence of `tokens` tokens."""
        return 0


class Sequence:
    """A request in progress, and its `Handle`.

    Args:
        answer: chooses and reports the tokens.
        withdraw: called with this object when the request is cancelled.

    Attributes:
        kv: keys and values of the tokens computed so far; None until the request is admitted.
        generation: number of the adapter's load; None if the adapter may change.
        stopping: True if a cancelled request ends with the pass in progress, whatever its bucket.
    """

    def __init__(self, answer: GeneratedAnswer, *, withdraw: Callable[["Sequence"], None]) -> None:
        self.answer = answer
        self.tokens = list(answer.request.prompt)
        self.kv: KeyValues | None = None
        self.held = ExitStack()
        self.generation: int | None = 0
        self.cancelled = self.stopping = False
        self._withdraw = withdraw
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

    def is_over(self) -> bool:
        """End a cancelled request. Returns True if no pass follows."""
        return self.answer.finish is not None or (self.cancelled and self.answer.cut(now=self.stopping))

    def cancel(self) -> None:
        self.cancelled = True
        self._withdraw(self)

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
        done, known = self.kv.length, len(self.tokens)
        if known > len(self.request.prompt):  # as long as the guess is right, take the token of the next row
            for row, guess in zip(output.logits, [*rows.tokens[1:], None], strict=True):
                if self.answer.ended:
                    break
                self.tokens.append(self.answer.add(row))
                if self.tokens[-1] != guess:
                    break
            self.answer.passed()
            self.kv.truncate(len(self.tokens) - 1)  # after the end, the last token is computed again and again
            return len(self.tokens) - known
        top = self.request.sampling.prompt_logprobs
        if top is not None:
            # the last token of the prompt has no following token
            pairs = zip(output.logits, self.tokens[done - len(rows.tokens) + 1 :], strict=False)
            self._prompt_logprobs += [token_logprob(row, token, top=top) for row, token in pairs]
        if self.request.pooling == "mean":
            # in order, so that the sum does not depend on the division of the prompt
            for row in output.hidden.double():
                self._sum = row if self._sum is None else self._sum + row
        if done < known:
            return 0
        if self.request.pooling is not None:
            self.answer.embedded(output.hidden[-1] if self._sum is None else (self._sum / done))
            return 0
        self.answer.start(self._prompt_logprobs if top is not None else ())
        if self.answer.finish is not None:
            return 0
        self.tokens.append(self.answer.add(output.logits[-1]))
        self.answer.passed()
        return 1

    def charge(self, **amounts: int) -> None:
        """Add costs to the ledger of this request, by the names of `RequestLedger`."""
        self._spent += RequestLedger(**amounts)
