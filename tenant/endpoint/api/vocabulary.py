"""The bytes of tokens, and grammars over them."""

from collections.abc import Callable, Collection
from functools import cached_property

from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.hf import from_tokenizer
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from symbiosis_priv.errors import ConfigError
from tenant.endpoint.engine.requests import Grammar

_SCHEMA_BYTES = 64 << 10
_LIMITS = LLParserLimits(verbose_errors=False)  # with the default limits of work and memory; errors must not quote text
_UNKNOWN = "\ufffd"


class Vocabulary:
    """The tokens of a model.

    Args:
        size: number of the model's logits.
        ends: tokens that end an answer.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, size: int, ends: Collection[int]) -> None:
        self.size = size
        self._tokenizer = tokenizer
        self._ends = sorted(ends)

    @cached_property
    def _tokens(self) -> LLTokenizer | None:
        """llguidance's tokenizer, made on first use, which takes a second for a vocabulary of 150,000."""
        if not isinstance(self._tokenizer, PreTrainedTokenizerFast):
            return None
        size = max(self.size, len(self._tokenizer))
        return from_tokenizer(self._tokenizer, n_vocab=size, eos_token=self._ends or None)

    def bytes_of(self, token: int) -> bytes | None:
        """Return the bytes of a token; None if they are unknown."""
        if self._tokens is not None:
            return bytes(self._tokens.decode_bytes([token]))
        text = str(self._tokenizer.decode([token], clean_up_tokenization_spaces=False))
        return None if _UNKNOWN in text else text.encode()

    def text_of(self, token: int) -> str:
        """Return the text of a token; bytes that are not UTF-8 are replaced."""
        return (self.bytes_of(token) or b"\xff").decode(errors="replace")

    def grammar(self, rules: str) -> Callable[[], Grammar]:
        """Compile a grammar. Returns a function that makes the state of a new answer.

        Args:
            rules: a grammar in llguidance's variant of Lark, which may contain JSON schemas: `start: %json {"type":
                "object"}`.

        Raises:
            ConfigError: a schema is invalid, too large or too complex, or cannot be enforced.
        """
        if self._tokens is None:
            raise ConfigError("this model's tokenizer cannot follow a JSON schema")
        if len(rules) > _SCHEMA_BYTES:
            raise ConfigError(f"the JSON schema has {len(rules):,} bytes; at most {_SCHEMA_BYTES:,} are allowed")
        try:
            matcher = LLMatcher(self._tokens, LLMatcher.grammar_from_lark(rules), log_level=0, limits=_LIMITS)
        except ValueError as error:
            raise ConfigError(f"the JSON schema is not valid: {error}") from error
        state = _Answer(matcher)
        state.allowed()  # raises for schemas that no answer satisfies
        return lambda: _Answer(matcher.deep_copy())


class _Answer:
    """The state of one answer: a `Grammar`."""

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher

    def allowed(self) -> bytes:
        mask = self._matcher.compute_bitmask()
        self._check()
        return mask

    def accept(self, token: int) -> None:
        self._matcher.consume_token(token)
        self._check()

    def finished(self) -> bool:
        return self._matcher.is_stopped()

    def _check(self) -> None:
        if self._matcher.is_error():
            reason = self._matcher.get_error().partition("\n")[0][:200]
            raise ConfigError(f"the JSON schema cannot be followed: {reason}")
