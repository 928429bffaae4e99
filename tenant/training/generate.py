"""Generation with a split model. `symbiosis-priv tenant generate` runs it."""

from itertools import takewhile
from pathlib import Path
from typing import Any

import torch
from transformers import (
    PreTrainedTokenizerBase,
    TextStreamer,
    set_seed,
)

import tenant.tasks.methods  # noqa: F401 - an adapter may be of one of its methods
from symbiosis_priv.checkpoints.vetting import vet_adapter
from symbiosis_priv.errors import ConfigError
from tenant.model.hf import RemoteConfig
from tenant.model.loading import load_adapter, load_language_model, load_tokenizer
from tenant.training.options import Decoding

_GREEDY = Decoding()


def open_model(
    model_path: str | Path, *, remote: RemoteConfig, adapter: Path | None = None, dtype: str = "auto"
) -> tuple[Any, PreTrainedTokenizerBase]:
    """Load a split model, its tokenizer and, if given, a PEFT adapter.

    Raises:
        ConfigError: `adapter` is not a PEFT folder.
        SymbiosisError: loading has failed.
    """
    if adapter is not None:
        vet_adapter(adapter)  # a quick check before the model is loaded
    tokenizer = load_tokenizer(model_path)
    model = load_language_model(model_path, remote=remote, dtype=dtype)
    return model if adapter is None else load_adapter(model, adapter), tokenizer


def generate(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    prompt: str,
    *,
    decoding: Decoding = _GREEDY,
    stream: bool = False,
) -> str:
    """Return the text that a model generates after a prompt.

    Args:
        model: a split model, for instance from `open_model`.
        prompt: plain text.
        decoding: how to choose tokens.
        stream: print words as they are generated. Beam search and `fixed_length` print the text at the end.

    Raises:
        ConfigError: the prompt has no tokens, or prompt and new tokens exceed the model's table of positions.
    """
    encoded = tokenizer(prompt, return_tensors="pt").to(model.device)
    if not encoded["input_ids"].numel():
        raise ConfigError("the prompt has no tokens; there is nothing to continue")
    _check_length(model, encoded["input_ids"].shape[1], decoding.max_new_tokens)
    streamer = None
    if stream and decoding.beams == 1 and not decoding.fixed_length:
        streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    endless = {"eos_token_id": None} if decoding.fixed_length else {}
    set_seed(decoding.seed)
    try:
        output = model.generate(
            input_ids=encoded["input_ids"],
            attention_mask=encoded["attention_mask"],
            max_new_tokens=decoding.max_new_tokens,
            do_sample=decoding.samples,
            temperature=decoding.temperature or None,
            top_p=decoding.top_p,
            num_beams=decoding.beams,
            trust_remote_code=False,  # generation_config.json may name code on the hub
            pad_token_id=tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id,
            **endless,
            streamer=streamer,
        )
    except BaseException:
        if streamer is not None and streamer.token_cache:  # end the line before the error message
            streamer.end()
        raise
    new = output[0, encoded["input_ids"].shape[1] :].tolist()
    if decoding.fixed_length:
        ends = _end_tokens(model, tokenizer)
        new = list(takewhile(lambda token: token not in ends, new))
    text = str(tokenizer.decode(new, skip_special_tokens=True))
    if stream and streamer is None:
        print(text)
    return text


def _check_length(model: Any, prompt: int, new: int) -> None:
    """Refuse more positions than a model with a table of position embeddings has. Rotary positions have no limit."""
    limit = getattr(model.config, "max_position_embeddings", None)
    words = model.get_input_embeddings()
    looked_up = any(isinstance(module, torch.nn.Embedding) and module is not words for module in model.modules())
    if looked_up and limit is not None and prompt + new > limit:
        raise ConfigError(
            f"{prompt} tokens of prompt and --max-new-tokens {new} are more than the model's {limit} positions; "
            f"shorten the prompt or ask for fewer"
        )


def _end_tokens(model: Any, tokenizer: PreTrainedTokenizerBase) -> set[int | None]:
    """Token ids that end a text: the model's, of which there may be several, and the tokenizer's."""
    ends = model.generation_config.eos_token_id
    return {*(ends if isinstance(ends, list) else [ends]), tokenizer.eos_token_id}
