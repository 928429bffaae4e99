"""Plain text files as blocks of tokens."""

from __future__ import annotations

from pathlib import Path

from transformers import PreTrainedTokenizerBase

from symbiosis_priv.errors import ConfigError

_MAX_HELD_OUT = 16  # loss is measured on them twice, and every block costs round trips


def read_documents(path: Path) -> list[str]:
    """The documents of a text file: what stands between blank lines, or every line if there is no blank line.

    Raises:
        ConfigError: unreadable, not UTF-8, or empty.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read as UTF-8 text: {error}") from error
    parts = text.split("\n\n") if "\n\n" in text.strip() else text.splitlines()
    documents = [part.strip() for part in parts if part.strip()]
    if not documents:
        raise ConfigError(f"{path} holds no text")
    return documents


def to_blocks(documents: list[str], tokenizer: PreTrainedTokenizerBase, *, length: int) -> list[list[int]]:
    """Token ids of all documents, each ended by the end-of-text token, one after the other in blocks of `length`.

    The rest that fills no block is left out, unless it is all there is.

    Raises:
        ConfigError: not even two tokens.
    """
    ids: list[int] = []
    for encoded in tokenizer(documents, verbose=False)["input_ids"]:
        ids += encoded
        if tokenizer.eos_token_id is not None and ids[-1:] != [tokenizer.eos_token_id]:
            ids.append(tokenizer.eos_token_id)
    if len(ids) < 2:
        raise ConfigError("the text has fewer than two tokens; there is nothing to predict")
    return [ids[i : i + length] for i in range(0, len(ids) - length + 1, length)] or [ids]


def hold_out(blocks: list[list[int]]) -> tuple[list[list[int]], list[list[int]]]:
    """(training blocks, held-out blocks): the last tenth and at most 16, none if there are fewer than ten."""
    count = min(len(blocks) // 10, _MAX_HELD_OUT)
    return blocks[: len(blocks) - count], blocks[len(blocks) - count :]
