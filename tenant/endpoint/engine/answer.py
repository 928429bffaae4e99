"""How the tokens of an answer are chosen, and decoded to text."""

from collections import Counter
from collections.abc import Collection, Sequence

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from symbiosis_priv.errors import NonFiniteError
from tenant.endpoint.engine.requests import Sampling, TokenLogprob

_LIKELY = 1024  # a top_p below 1 rarely needs more tokens; sorting a whole vocabulary takes 10 ms
_CONTEXT = 8  # tokens of the prompt that decide whether the first word begins with a space
_PENDING = 16  # limit of tokens without a complete character; a character has at most 4 bytes, so more are not text
_UNKNOWN = "\ufffd"  # replaces bytes that are not a character, or not yet a complete one


class Sampler:
    """Chooses one token after another for one request. Each request has its own random numbers, counts of tokens and
    grammar, so a token does not depend on the other requests of a batch. A sampled token takes one random number.
    `prompt`: the tokens before the answer, for `repetition_penalty`. `ends`: the stop tokens, for `min_tokens`."""

    def __init__(self, sampling: Sampling, *, prompt: Sequence[int] = (), ends: Collection[int] = ()) -> None:
        self._sampling = sampling
        self._ends = list(ends)
        self._new = 0
        self._prompt = prompt
        self._seen: Tensor | None = None  # True for tokens of the prompt and the answer
        self._grammar = None if sampling.grammar is None else sampling.grammar()
        self.finished = False  # True if the grammar allows only an end token
        self._uses: Counter[int] = Counter()
        self._added: Tensor | None = None  # biases and penalties, which are added to the logits
        self._random = torch.Generator(device="cpu")
        if sampling.seed is None:
            self._random.seed()
        else:
            self._random.manual_seed(sampling.seed)

    def __call__(self, logits: Tensor) -> tuple[int, TokenLogprob | None]:
        """Choose the next token. `logits`: the model's own logits, `[vocabulary]`, floating point, on any device.
        Returns the token, and its log probability if requested. Greedy decoding without biases, penalties and grammar
        chooses `logits.float().argmax()`. Raises `NonFiniteError`: no token has a probability."""
        options, scores = self._sampling, logits.detach().float()
        if options.repetition_penalty != 1:  # as in transformers, so that greedy tokens are those of `generate()`
            if self._seen is None:
                self._seen = torch.zeros(scores.shape, dtype=torch.bool, device=scores.device)
                self._seen[list(self._prompt)] = True
            penalty = options.repetition_penalty
            scores = torch.where(self._seen, torch.where(scores < 0, scores * penalty, scores / penalty), scores)
        if self._added is None and (options.logit_bias or options.presence_penalty or options.frequency_penalty):
            self._added = torch.zeros(scores.shape, dtype=torch.float32, device=scores.device)
            for biased, bias in options.logit_bias.items():
                self._added[biased] = bias
        if self._added is not None:
            scores = scores + self._added
        if self._grammar is not None:
            bits = np.unpackbits(np.frombuffer(self._grammar.allowed(), np.uint8), bitorder="little")
            allowed = torch.zeros(scores.shape, dtype=torch.bool, device="cpu")
            allowed[: len(bits)] = torch.from_numpy(bits[: len(scores)]).bool()
            scores = scores.masked_fill(~allowed.to(scores.device), -torch.inf)
        if self._new < options.min_tokens and self._ends:
            scores = scores.index_fill(0, torch.tensor(self._ends, dtype=torch.int64, device=scores.device), -torch.inf)
        token = int(scores.argmax()) if options.temperature == 0 else self._drawn(scores.cpu())
        self._new += 1
        if self._seen is not None:
            self._seen[token] = True
        if self._grammar is not None:
            self.finished = self._grammar.accept(token)
        if self._added is not None and (options.presence_penalty or options.frequency_penalty):
            self._uses[token] += 1
            self._added[token] -= options.frequency_penalty + options.presence_penalty * (self._uses[token] == 1)
        if options.logprobs is None:
            return token, None
        scale = options.temperature if options.scaled_logprobs and options.temperature else 1.0
        return token, token_logprob(logits.double() / scale, token, top=options.logprobs)

    def _drawn(self, scores: Tensor) -> int:
        options = self._sampling
        chances = torch.softmax(scores.double() / options.temperature, dim=-1)
        tokens = None
        if options.top_k or options.top_p < 1:
            every = len(chances)
            ordered, tokens = chances.topk(min(options.top_k or _LIKELY, every))
            if not options.top_k and float(ordered.sum()) < options.top_p:
                ordered, tokens = chances.topk(every)
            kept = ordered.cumsum(0) - ordered < options.top_p * ordered.sum()
            kept[0] = True
            chances = ordered * kept
        if options.min_p:
            chances = chances * (chances >= options.min_p * chances.max())
        sums = chances.cumsum(0)
        if not 0 < float(sums[-1]) < float("inf"):
            raise NonFiniteError
        drawn = torch.rand((), generator=self._random, dtype=torch.float64, device="cpu") * sums[-1]
        place = torch.searchsorted(sums, drawn, right=True)
        return int(place if tokens is None else tokens[place])


def token_logprob(logits: Tensor, token: int, *, top: int) -> TokenLogprob:
    """Return the log probability of a token, computed in float64, and the `top` most probable tokens. `logits`: the
    model's own, `[vocabulary]`."""
    logprobs = torch.log_softmax(logits.detach().double(), dim=-1)
    values, tokens = logprobs.topk(min(top, len(logprobs)))
    return TokenLogprob(
        logprob=float(logprobs[token]), top=tuple(zip(map(int, tokens.tolist()), values.tolist(), strict=True))
    )


class TextStream:
    """Decodes one token after another, and looks for the stop texts. The returned texts together are the text of all
    tokens up to a stop text. Special tokens are left out of it; stop texts are looked for in the text with them. This
    works with every tokenizer of transformers. `tokenizers.DecodeStream` raises an exception for bytes that are not
    text, which a model may generate. `stop`: texts that end the answer and are not part of it. `place`: number of
    characters of the text before the next token, without a character that the token may continue."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, *, prompt: Sequence[int] = (), stop: Sequence[str] = ()
    ) -> None:
        self._tokenizer = tokenizer
        self._before = list(prompt[-_CONTEXT:])
        # the answer may complete a character of the prompt
        self._returned = self._decoded(self._before).rstrip(_UNKNOWN)
        self._pending: list[int] = []
        self._stop = [text for text in stop if text]
        self._held: list[tuple[str, bool]] = []  # texts, and whether they are part of the answer
        self._certain = self.place = 0
        self.stopped: str | None = None  # the stop text that was found

    def add(self, token: int) -> str:
        """Add a token. Returns the text that has become certain: complete characters that do not begin a stop text."""
        self._pending.append(token)
        special = ""
        if self._stop and not self._decoded([token]):
            special = str(self._tokenizer.decode([token], clean_up_tokenization_spaces=False))
        return self._passed(self._new(), special)

    def end(self) -> str:
        """Return the rest of the text: incomplete characters, and the beginning of a stop text. Empty after a stop."""
        return "" if self.stopped is not None else self._passed(self._new(last=True), last=True)

    def _new(self, *, last: bool = False) -> str:
        text = self._decoded(self._before + self._pending)
        new = text[len(self._returned) :]
        incomplete = not last and len(self._pending) < _PENDING and (not new or text.endswith(_UNKNOWN))
        self.place = self._certain + len(new.rstrip(_UNKNOWN) if incomplete else new)
        if incomplete:
            return ""
        self._certain = self.place
        self._before, self._pending = self._pending, []
        self._returned = self._decoded(self._before)
        return new

    def _decoded(self, tokens: list[int]) -> str:
        return str(self._tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False))

    def _passed(self, text: str, special: str = "", *, last: bool = False) -> str:
        """Add text and a special token's. Returns the text of the answer that is certain now."""
        self._held += [(text, True), (special, False)]
        searched = "".join(held for held, _ in self._held)
        found = [(at, stop) for stop in self._stop if (at := searched.find(stop)) >= 0]
        self.stopped = min(found)[1] if found else None
        overlap = 0 if last else max((overlap_length(searched, stop) for stop in self._stop), default=0)
        certain = min(found)[0] if found else len(searched) - overlap
        passed, rest = "", []
        for held, shown in self._held:
            passed += held[:certain] if shown else ""
            rest.append((held[certain:], shown))
            certain = max(certain - len(held), 0)
        self._held = [one for one in rest if one[0] and self.stopped is None]
        return passed


def overlap_length(text: str, stop: str) -> int:
    """Return the length of the longest suffix of `text` that is a prefix of `stop`."""
    return next(size for size in range(min(len(stop) - 1, len(text)), -1, -1) if text.endswith(stop[:size]))
