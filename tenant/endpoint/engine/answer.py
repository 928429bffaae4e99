"""The answer to one request: chooses and decodes its tokens, and sends the events to the request's sink."""

from collections.abc import Sequence

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from symbiosis_priv.errors import SymbiosisError
from tenant.endpoint.engine.requests import (
    Done,
    Embedded,
    EngineRequest,
    Failed,
    Finish,
    RequestLedger,
    Sink,
    Started,
    Token,
    TokenLogprob,
)
from tenant.endpoint.engine.sampling import Sampler
from tenant.endpoint.engine.text_stream import TextStream


class GeneratedAnswer:
    """One answer. The engine calls `start`, then `add` for every token until `finish` is set, then `done` or `fail`."""

    def __init__(self, request: EngineRequest, sink: Sink, tokenizer: PreTrainedTokenizerBase) -> None:
        self.request = request
        self.finish: Finish | None = None
        self.new_tokens = 0
        self._end: Finish | None = None
        self._computed = 0
        self._sink = sink
        self._sampler = Sampler(request.sampling)
        self._text = TextStream(tokenizer, prompt=request.prompt, stop=request.stop)

    def start(self, prompt_logprobs: Sequence[TokenLogprob | None] = ()) -> None:
        """Report that the prompt has been read."""
        self._sink(Started(prompt_logprobs=tuple(prompt_logprobs)))
        if self.request.max_tokens == 0:
            self.finish = "length"

    def add(self, logits: Tensor) -> int:
        """Choose and report the next token, and decide whether the answer ends with it.

        Tokens after the end of an answer of fixed length are not reported.

        Args:
            logits: `[vocabulary]`, the model's own logits.
        """
        self._computed += 1
        token = self._next(logits) if self._end is None else int(logits.argmax())
        if not self.request.fixed_length or self._computed >= self.request.max_tokens:
            self.finish = self._end
        return token

    def _next(self, logits: Tensor) -> int:
        token, logprob = self._sampler(logits)
        self.new_tokens += 1
        if token in self.request.stop_tokens:
            self._end = "stop"
            return token
        self._sink(Token(id=token, text=self._text.add(token), logprob=logprob))
        if self._text.stopped or self._sampler.finished:
            self._end = "stop"
        elif self.new_tokens >= self.request.max_tokens:
            self._end = "length"
        return token

    def embedded(self, vector: Tensor) -> None:
        """Report the requested embedding, float `[width]`."""
        self._sink(Embedded(vector=tuple(vector.float().tolist())))
        self.finish = "stop"

    def done(self, ledger: RequestLedger) -> None:
        """Report the end. An answer without `finish` was cancelled."""
        self.finish = self.finish or "cancelled"
        self._sink(
            Done(
                finish=self.finish,
                text=self._text.end(),
                prompt_tokens=len(self.request.prompt),
                new_tokens=self.new_tokens,
                ledger=ledger,
            )
        )

    def fail(self, error: SymbiosisError) -> None:
        """Report a failure."""
        self._sink(Failed(error=error))
