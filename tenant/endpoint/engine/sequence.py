"""One request in progress: its tokens, keys and values, events and costs."""

from collections.abc import Callable
from collections.abc import Sequence as Tokens
from contextlib import ExitStack

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from symbiosis_priv.errors import SymbiosisError
from tenant.endpoint.engine.answer import Sampler, TextStream, token_logprob
from tenant.endpoint.engine.kv import KeyValues
from tenant.endpoint.engine.packed_model import NextTokens, Output
from tenant.endpoint.engine.requests import (
    Done,
    EngineRequest,
    Failed,
    Finish,
    RequestLedger,
    ShownRow,
    Sink,
    Started,
    Token,
    TokenLogprob,
)


class Sequence:
    """A request in progress. The engine calls `rows` and `take` for each pass until `is_over`; then `done` or `fail`.

    Args:
        sink: gets the events.
        withdraw: called with this object when the request is cancelled.

    Attributes:
        tokens: those of the prompt and of the answer, a stop token included.
        kv: keys and values of the tokens computed so far; None until the request is admitted.
        generation: number of the adapter's load; None if the adapter may change.
        finish: why the answer has ended; None until its last pass.
        row: a row of the last token, if requested.
        stopping: True if a cancelled request ends with the pass in progress, whatever its bucket.
    """

    def __init__(
        self,
        request: EngineRequest,
        sink: Sink,
        tokenizer: PreTrainedTokenizerBase,
        *,
        withdraw: Callable[["Sequence"], None],
    ) -> None:
        self.request = request
        self.tokens = list(request.prompt)
        self.kv: KeyValues | None = None
        self.held = ExitStack()
        self.generation: int | None = 0
        self.finish: Finish | None = None
        self.row: ShownRow | None = None
        self.cancelled = self.stopping = False
        self._end: Finish | None = None
        self._stop: Token | None = None
        self._passes = 0
        self._sink, self._withdraw = sink, withdraw
        self._sampler = Sampler(request.sampling, prompt=request.prompt, ends=request.stop_tokens)
        self._text = TextStream(tokenizer, prompt=request.prompt, stop=request.stop)
        self._spent = RequestLedger()
        self._prompt_logprobs: list[TokenLogprob | None] = [None]
        self._sum: Tensor | None = None
        self._vector: tuple[float, ...] = ()

    @property
    def decoding(self) -> bool:
        """True if the prompt has been read."""
        return self.kv is not None and self.kv.length >= len(self.request.prompt)

    @property
    def reads_all(self) -> bool:
        """True if the results of every token of the prompt are needed, so that no cached prefix can be used."""
        return self.request.pooling == "mean" or self.request.sampling.prompt_logprobs is not None

    def is_over(self) -> bool:
        """End a cancelled request. Returns True if no pass follows. Passes without tokens fill its bucket, because the
        moment of the end may depend on the text."""
        if self.finish is None and self.cancelled:
            self._end = self._end or "cancelled"
            return self.stopping or self._passes % self.request.bucket == 0
        return self.finish is not None

    def cancel(self) -> None:
        """End the request at the next step; `Done` with "cancelled" follows. No effect on a request that has ended."""
        self.cancelled = True
        self._withdraw(self)

    def ledger(self) -> RequestLedger:
        """Return the costs so far."""
        return self._spent

    def charge(self, **amounts: int) -> None:
        """Add costs to the ledger of this request, by the names of `RequestLedger`."""
        self._spent += RequestLedger(**amounts)

    def _add(self, logits: Tensor) -> int:
        """Choose and report the next token, and decide whether the answer ends with it. `logits`: `[vocabulary]`, the
        model's own logits."""
        token, logprob = self._sampler(logits)
        self.tokens.append(token)
        if token in self.request.stop_tokens:
            self._end, self._stop = "stop", Token(id=token, text="", logprob=logprob)
            return token
        place = self._text.place
        self._sink(Token(id=token, text=self._text.add(token), logprob=logprob, place=place))
        if self._text.stopped is not None or self._sampler.finished:
            self._end = "stop"
        elif self._new_tokens >= self.request.max_tokens:
            self._end = "length"
        return token

    def _passed(self) -> None:
        """Count a pass that has computed a token, or would have. After the last token, passes fill the bucket."""
        self._passes += 1
        if self._passes % self.request.bucket == 0:
            self.finish = self._end

    def embedded(self, vector: Tensor) -> None:
        """Take the requested embedding or logits, float `[width]`."""
        self._vector = tuple(vector.float().tolist())
        self.finish = "stop"

    def done(self) -> None:
        """Report the end. An answer that has not ended was cancelled."""
        self._sink(
            Done(
                finish=self.finish or self._end or "cancelled",
                stop_text=self._text.stopped,
                text=self._text.end(),
                prompt_tokens=len(self.request.prompt),
                new_tokens=self._new_tokens,
                ledger=self._spent,
                row=self.row,
                stop=self._stop,
                vector=self._vector,
            )
        )

    def fail(self, error: SymbiosisError) -> None:
        """Report a failure."""
        self._sink(Failed(error=error))

    @property
    def _new_tokens(self) -> int:
        return len(self.tokens) - len(self.request.prompt)

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
        pooled = self.request.pooling is not None
        return NextTokens(kv=self.kv, tokens=tokens, adapter=self.request.adapter, logits=logits, pooled=pooled)

    def take(self, rows: NextTokens, output: Output) -> None:
        """Process the results of `rows`."""
        assert self.kv is not None
        done, known = self.kv.length, len(self.tokens)
        if known > len(self.request.prompt):  # as long as the guess is right, take the token of the next row
            for row, guess in zip(output.logits, [*rows.tokens[1:], None], strict=True):
                if self._end is not None or self._add(row) != guess:
                    break
            self._passed()
            self.kv.truncate(len(self.tokens) - 1)  # after the end, the last token is computed again and again
            return
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
            return
        if self.request.pooling is not None:
            self.embedded(output.hidden[-1] if self._sum is None else (self._sum / done))
            return
        self._sink(Started(prompt_logprobs=tuple(self._prompt_logprobs if top is not None else ())))
        if self.request.max_tokens == 0:
            self.finish = "length"
            return
        self._add(output.logits[-1])
        self._passed()
