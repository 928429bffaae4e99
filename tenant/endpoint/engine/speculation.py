"""Guesses the next tokens of sequences, so that one pass through the model may yield several tokens.

A pass computes the last token of a sequence and a guess of the `ahead` tokens after it. The engine chooses a token from
each row as without a guess, and continues with the next row while the chosen token equals the guessed one. So a guess
changes the number of passes but no token: logits (`attention`, `row_blocks`), random number, penalties and grammar are
the same. For a deterministic guess, this is rejection sampling (Leviathan et al., arXiv 2211.17192): a guessed token is
accepted with the probability that the model assigns to it.

Every guess has `ahead` tokens. So executors see the same number of rows in each step, and do not see how many guessed
tokens were accepted. They see the number of steps of an answer (docs/threat-model.md).
"""

from collections.abc import Sequence

import numpy as np

_LONGEST = 3  # tokens of an n-gram


def guess(text: Sequence[int], ahead: int) -> list[int]:
    """Return the `ahead` tokens after the latest earlier occurrence of the last n-gram of a text (prompt lookup, Saxena
    2023), repeated if there are fewer; without an occurrence, the last token."""
    tokens = np.array(text, np.int64)
    following = tokens[-1:]
    for count in range(min(_LONGEST, len(tokens) - 1), 0, -1):
        start = len(tokens) - count
        same = np.logical_and.reduce([tokens[i : start + i] == tokens[start + i] for i in range(count)])
        if same.any():
            following = tokens[start - 1 - int(same[::-1].argmax()) + count :]
            break
    return [int(token) for token in np.resize(following, ahead)]
