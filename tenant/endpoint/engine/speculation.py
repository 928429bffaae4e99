"""Guesses the next tokens of sequences, so that one pass through the model may yield several tokens.

A pass computes the last token of a sequence and a guess of the `ahead` tokens after it. The engine chooses a token from
each row as without a guess, and continues with the next row while the chosen token equals the guessed one. So a guess
changes the number of passes but no token: logits (`attention`, `row_blocks`), random number, penalties and grammar are
the same. For a deterministic guess, this is rejection sampling (Leviathan et al., arXiv 2211.17192): a guessed token is
accepted with the probability that the model assigns to it.

Every guess has `ahead` tokens. So executors see the same number of rows in each step, and do not see how many guessed
tokens were accepted. They see the number of steps of an answer (docs/threat-model.md).
"""

from collections.abc import Collection
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
from transformers import PreTrainedTokenizerBase

from symbiosis_priv.errors import ConfigError, UnsupportedModelError
from tenant.endpoint.engine.kv import KeyValues
from tenant.endpoint.engine.packed_model import NextTokens, PackedModel
from tenant.endpoint.engine.sequence import Drafter, Sequence
from tenant.model.loading import load_language_model, load_tokenizer
from tenant.training.corpus import context_of

_LONGEST = 3  # tokens of an n-gram
_READ = 256  # tokens of a sequence that a draft model reads in one step


class PromptLookup(Drafter):
    """Guesses that a sequence continues as after the latest earlier occurrence of its last n-gram (Saxena 2023).
    `ahead`: tokens of a guess."""

    def __init__(self, *, ahead: int = 4) -> None:
        self.ahead = ahead

    def draft(self, sequences: Collection[Sequence]) -> dict[Sequence, list[int]]:
        return {one: _continued(np.array(one.tokens), self.ahead) for one in sequences if one.decoding}


class DraftModel(Drafter):
    """Guesses the most probable tokens of a small model that the tenant holds. `vocabulary`: number of token ids that
    both models share. Embeddings may have more rows. `ahead`: tokens of a guess."""

    def __init__(self, packed: PackedModel, *, vocabulary: int, ahead: int = 4) -> None:
        self.ahead = ahead
        self._packed, self._vocabulary = packed, vocabulary
        self._context = context_of(packed.config)
        self._read: WeakKeyDictionary[Sequence, KeyValues] = WeakKeyDictionary()

    def bytes(self, tokens: int) -> int:
        return self._packed.shape.bytes(tokens, step=_READ + self.ahead)

    def draft(self, sequences: Collection[Sequence]) -> dict[Sequence, list[int]]:
        """Read the new tokens of each sequence, and guess for sequences that the small model has read completely. The
        last two tokens are read in each step, even if one of them was read before, so that the time of a step does not
        depend on the number of accepted tokens."""
        parts: dict[Sequence, NextTokens] = {}
        for sequence in sequences:
            kv = self._read.setdefault(sequence, self._packed.new_kv())
            kv.truncate(max(0, len(sequence.tokens) - 2))
            kv.release()
            tokens = [min(token, self._vocabulary - 1) for token in sequence.tokens[kv.length :][:_READ]]
            if tokens and (self._context is None or len(sequence.tokens) + self.ahead <= self._context):
                complete = kv.length + len(tokens) == len(sequence.tokens)
                parts[sequence] = NextTokens(kv=kv, tokens=tokens, logits=int(complete and sequence.decoding))
        guesses: dict[Sequence, list[int]] = {}
        for _ in range(self.ahead):
            if not parts:
                break
            outputs = self._packed(list(parts.values()))
            for sequence, output in zip(parts, outputs, strict=True):
                if len(output.logits):
                    guesses.setdefault(sequence, []).append(int(output.logits[-1, : self._vocabulary].argmax()))
            parts = {s: NextTokens(kv=self._read[s], tokens=guess[-1:]) for s, guess in guesses.items()}
        return {s: guesses.get(s) or s.tokens[-1:] * self.ahead for s in sequences if s.decoding}


def open_drafter(draft: str, tokenizer: PreTrainedTokenizerBase, *, ahead: int) -> Drafter:
    """Open a drafter. `draft`: a checkpoint folder or a name on the hub; "prompt" for `PromptLookup`. Raises
    `ConfigError`: the small model has another tokenizer; `SymbiosisError`: it cannot be loaded, or `PackedModel` does
    not support it."""
    if draft == "prompt":
        return PromptLookup(ahead=ahead)
    if load_tokenizer(draft).get_vocab() != tokenizer.get_vocab():
        raise ConfigError(f"the draft model {draft} has another tokenizer; use a smaller model of the same family")
    try:
        packed = PackedModel(load_language_model(draft))
    except UnsupportedModelError as error:
        raise UnsupportedModelError(f"{draft} cannot guess tokens, because {error}") from error
    return DraftModel(packed, vocabulary=len(tokenizer), ahead=ahead)


def _continued(tokens: npt.NDArray[np.int64], ahead: int) -> list[int]:
    """Return the `ahead` tokens after the latest earlier occurrence of the last n-gram, repeated if there are fewer;
    without an occurrence, the last token."""
    following = tokens[-1:]
    for count in range(min(_LONGEST, len(tokens) - 1), 0, -1):
        start = len(tokens) - count
        same = np.logical_and.reduce([tokens[i : start + i] == tokens[start + i] for i in range(count)])
        if same.any():
            following = tokens[start - 1 - int(same[::-1].argmax()) + count :]
            break
    return [int(token) for token in np.resize(following, ahead)]
