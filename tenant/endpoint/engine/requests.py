"""Requests to an engine, and their events. Does not import torch."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol

from symbiosis_priv.errors import SymbiosisError

Finish = Literal["stop", "length", "cancelled"]
Pooling = Literal["last", "mean", "logits"]
MOST_BUCKET = 4096
"""An answer of one token takes as many passes as its bucket."""
AHEAD = 4
"""Tokens that are guessed for a step of an answer, with `--draft`."""


class Grammar(Protocol):
    """The state of a constraint on the tokens of one answer, such as a JSON schema."""

    def allowed(self) -> bytes:
        """Return one bit per token of the vocabulary: bit `t % 8` of byte `t // 8` is 1 if token `t` may follow."""

    def accept(self, token: int) -> bool:
        """Advance the state by an allowed token. Returns True if only an end token may follow."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How to choose the tokens of one answer.

    Args:
        temperature: 0 for greedy decoding.
        top_p: sample from the smallest set of tokens with this probability.
        seed: seed of this request's own generator; None for a random one.
        presence_penalty, frequency_penalty: subtracted from the logits of tokens in the answer, once, and once per use.
        repetition_penalty: logits of tokens in the prompt or the answer are divided by it if they are positive, and
            multiplied by it if they are negative.
        min_p: sample from tokens with at least this share of the probability of the most probable one.
        logprobs: number of most probable tokens to report with each token; None to report no log probabilities.
        prompt_logprobs: the same for the tokens of the prompt.
        scaled_logprobs: report the log probabilities of tokens at the temperature, not at 1.
        grammar: makes the state of a constraint; None without one.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    min_p: float = 0.0
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    scaled_logprobs: bool = False
    grammar: Callable[[], Grammar] | None = None


@dataclass(frozen=True, kw_only=True)
class EngineRequest:
    """One answer to generate, or one embedding to compute.

    Args:
        id: name of the request in logs, without any text of the prompt.
        prompt: token ids, at least one.
        client: requests of different clients get equal shares. The API uses a digest of the API key.
        stop_tokens: token ids that end the answer and are not part of it.
        stop: texts that end the answer and are not part of it.
        bucket: executors see row counts and passes in multiples of this number: rows of the prompt (in multiples of
            `EngineLimits.prompt_rows` at most), which are filled with rows of no meaning, and passes of the answer.
            `Done` follows the last pass of the bucket.
        pooling: compute an embedding of the prompt instead of an answer, or a classifier's logits.
        types: the type of each token, for a classifier that reads pairs of texts.
        shows_row: report a row of the last token that was computed without other requests (`Done.row`).
    """

    id: str
    prompt: tuple[int, ...]
    adapter: str | None = None
    client: str = ""
    max_tokens: int = 16
    stop_tokens: frozenset[int] = frozenset()
    stop: tuple[str, ...] = ()
    sampling: Sampling = field(default_factory=Sampling)
    bucket: int = 1
    pooling: Pooling | None = None
    types: tuple[int, ...] | None = None
    shows_row: bool = False

    @property
    def full_length(self) -> int:
        """Largest number of tokens, including the prompt."""
        return len(self.prompt) + (self.max_tokens if self.pooling is None else 0)


@dataclass(frozen=True, kw_only=True)
class TokenLogprob:
    """A token's log probability before penalties, and the most probable tokens at its position. Also before the
    temperature, unless `scaled_logprobs` is set."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, kw_only=True)
class RequestLedger:
    """Costs of one request, and numbers of verified and rejected rows. Not secret.

    Args:
        rows: masked rows that were sent for this request.
        round_trips: requests to executors with rows of this request, and perhaps of others.
        bytes_up, bytes_down: bytes to and from all providers, divided among requests by rows.
        cached_tokens: tokens of the prompt whose keys and values were cached.
    """

    rows: int = 0
    round_trips: int = 0
    answers_verified: int = 0
    answers_rejected: int = 0
    bytes_up: int = 0
    bytes_down: int = 0
    cached_tokens: int = 0

    def __add__(self, other: "RequestLedger") -> "RequestLedger":
        return RequestLedger(**{name: n + getattr(other, name) for name, n in vars(self).items()})

    def rounded(self) -> "RequestLedger":
        """Return the costs with two digits of what also depends on the rows of other requests in the same steps."""
        shared = ("round_trips", "bytes_up", "bytes_down")
        return replace(self, **{name: int(float(f"{getattr(self, name):.1e}")) for name in shared})


@dataclass(frozen=True, kw_only=True)
class ShownRow:
    """The input row of a token at the first layer group, for the client of the request only: `hidden` integers, which
    do not leave this machine, and the integers that the executor `saw` in their place."""

    hidden: tuple[int, ...] = field(repr=False)
    saw: tuple[int, ...] = field(repr=False)


@dataclass(frozen=True, kw_only=True)
class Started:
    """The prompt has been read. `prompt_logprobs`: one entry per token of the prompt, the first one None; empty if not
    requested."""

    prompt_logprobs: tuple[TokenLogprob | None, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Token:
    """One new token. `text`: text that has become certain with this token. May be empty, because a character may need
    several tokens and a stop text may have begun. `logprob`: the log probability, if requested. `place`: number of the
    answer's characters before the token."""

    id: int
    text: str
    logprob: TokenLogprob | None = None
    place: int = 0


@dataclass(frozen=True, kw_only=True)
class Done:
    """The last event of a request that succeeded or was cancelled.

    Args:
        finish: "stop" at a stop token or text or at the end of a grammar, "length" at `max_tokens`.
        stop_text: the stop text that ended it.
        prompt_tokens, new_tokens: numbers of tokens; the stop token counts as new.
        row: a row of the last token, if requested and computed without other requests.
        stop: the stop token that ended the answer, with its log probability if requested.
        vector: the requested embedding or logits, float32 values.
    """

    finish: Finish
    stop_text: str | None = None
    text: str = ""
    prompt_tokens: int = 0
    new_tokens: int = 0
    ledger: RequestLedger = field(default_factory=RequestLedger)
    row: ShownRow | None = None
    stop: Token | None = None
    vector: tuple[float, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Failed:
    """The last event of a request that failed. Other requests continue."""

    error: SymbiosisError


Event = Started | Token | Done | Failed
Sink = Callable[[Event], None]
"""Receives the events of a request, in the engine's thread. It must not block and must not raise."""


@dataclass(frozen=True, kw_only=True)
class Load:
    """The load of an engine: numbers of requests, and of all steps since the start."""

    running: int
    waiting: int
    steps: int
