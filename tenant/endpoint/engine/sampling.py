"""Chooses the tokens of one request from the model's logits."""

from collections import Counter

import numpy as np
import torch
from torch import Tensor

from symbiosis_priv.errors import NonFiniteError
from tenant.endpoint.engine.requests import Sampling, TokenLogprob

_LIKELY = 1024  # a top_p below 1 rarely needs more tokens; sorting a whole vocabulary takes 10 ms


class Sampler:
    """Chooses one token after another for one request.

    Each request has its own random numbers, counts of tokens and grammar, so a token does not depend on the other
    requests of a batch. A sampled token takes one random number.
    """

    def __init__(self, sampling: Sampling) -> None:
        self._sampling = sampling
        self._grammar = None if sampling.grammar is None else sampling.grammar()
        self._uses: Counter[int] = Counter()
        self._added: Tensor | None = None  # biases and penalties, which are added to the logits
        self._random = torch.Generator(device="cpu")
        if sampling.seed is None:
            self._random.seed()
        else:
            self._random.manual_seed(sampling.seed)

    def __call__(self, logits: Tensor) -> tuple[int, TokenLogprob | None]:
        """Choose the next token.

        Args:
            logits: the model's own logits, `[vocabulary]`, floating point, on any device.

        Returns:
            The token, and its log probability if requested. Greedy decoding without biases, penalties and grammar
            chooses `logits.float().argmax()`.

        Raises:
            NonFiniteError: no token has a probability.
        """
        options = self._sampling
        scores = self._scores(logits.detach().float())
        token = int(scores.argmax()) if options.temperature == 0 else self._drawn(scores.cpu())
        if self._grammar is not None:
            self._grammar.accept(token)
        if self._added is not None and (options.presence_penalty or options.frequency_penalty):
            self._uses[token] += 1
            self._added[token] -= options.frequency_penalty + options.presence_penalty * (self._uses[token] == 1)
        return token, None if options.logprobs is None else token_logprob(logits, token, top=options.logprobs)

    @property
    def finished(self) -> bool:
        """True if the grammar allows only an end token."""
        return self._grammar is not None and self._grammar.finished()

    def _scores(self, logits: Tensor) -> Tensor:
        options = self._sampling
        if self._added is None and (options.logit_bias or options.presence_penalty or options.frequency_penalty):
            self._added = torch.zeros(logits.shape, dtype=torch.float32, device=logits.device)
            for token, bias in options.logit_bias.items():
                self._added[token] = bias
        if self._added is not None:
            logits = logits + self._added
        if self._grammar is not None:
            bits = np.unpackbits(np.frombuffer(self._grammar.allowed(), np.uint8), bitorder="little")
            allowed = torch.zeros(logits.shape, dtype=torch.bool, device="cpu")
            allowed[: len(bits)] = torch.from_numpy(bits[: len(logits)]).bool()
            logits = logits.masked_fill(~allowed.to(logits.device), -torch.inf)
        return logits

    def _drawn(self, scores: Tensor) -> int:
        options = self._sampling
        chances = torch.softmax(scores.double() / options.temperature, dim=-1)
        tokens = None
        if options.top_k or options.top_p < 1:
            chances, tokens = _most_likely(chances, options.top_k, options.top_p)
        sums = chances.cumsum(0)
        if not 0 < float(sums[-1]) < float("inf"):
            raise NonFiniteError
        drawn = torch.rand((), generator=self._random, dtype=torch.float64, device="cpu") * sums[-1]
        place = torch.searchsorted(sums, drawn, right=True)
        return int(place if tokens is None else tokens[place])


def _most_likely(chances: Tensor, top_k: int, top_p: float) -> tuple[Tensor, Tensor]:
    """Return the probabilities of the `top_k` most likely tokens, 0 for those outside `top_p`; and the tokens."""
    every = len(chances)
    ordered, tokens = chances.topk(min(top_k or _LIKELY, every))
    if not top_k and float(ordered.sum()) < top_p:
        ordered, tokens = chances.topk(every)
    before = ordered.cumsum(0) - ordered
    kept = before < top_p * ordered.sum()
    kept[0] = True
    return ordered * kept, tokens


def token_logprob(logits: Tensor, token: int, *, top: int) -> TokenLogprob:
    """Return the log probability of a token, computed in float64, and the `top` most probable tokens.

    Args:
        logits: the model's own, `[vocabulary]`.
        token: a token of the vocabulary.
        top: number of tokens to report; all tokens if it exceeds the vocabulary.
    """
    logprobs = torch.log_softmax(logits.detach().double(), dim=-1)
    values, tokens = logprobs.topk(min(top, len(logprobs)))
    return TokenLogprob(
        logprob=float(logprobs[token]), top=tuple(zip(map(int, tokens.tolist()), values.tolist(), strict=True))
    )
