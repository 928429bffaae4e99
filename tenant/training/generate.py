"""Generation with a split model. `symbiosis-priv tenant generate` runs it."""

from itertools import takewhile
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase, TextStreamer, set_seed

import tenant.tasks.methods  # noqa: F401 - an adapter may be of one of its methods
from symbiosis_priv.checkpoints.vetting import vet_adapter
from symbiosis_priv.errors import ConfigError
from tenant.model.hf import RemoteConfig
from tenant.model.loading import load_adapter, load_language_model, load_tokenizer, warn_of_other_template
from tenant.training.corpus import check_context, context_of, render_chat
from tenant.training.options import Decoding

_GREEDY = Decoding()


def open_model(
    model_path: str | Path, *, remote: RemoteConfig, adapter: Path | None = None, dtype: str = "auto"
) -> tuple[Any, PreTrainedTokenizerBase]:
    """Load a split model, its tokenizer and, if given, a PEFT adapter. The chat template is the base model's. Raises
    `ConfigError`: `adapter` is not a PEFT folder; `SymbiosisError`: loading has failed."""
    if adapter is not None:
        vet_adapter(adapter)  # a quick check before the model is loaded
    tokenizer = load_tokenizer(model_path)
    if adapter is not None:
        warn_of_other_template(adapter, tokenizer)
    model = load_language_model(model_path, remote=remote, dtype=dtype, tokenizer=tokenizer)
    return model if adapter is None else load_adapter(model, adapter), tokenizer


def generate(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    prompt: str,
    *,
    chat: bool = False,
    decoding: Decoding = _GREEDY,
    stream: bool = False,
) -> str:
    """Return the text that a model generates after a prompt. `chat`: the prompt is a message of the user, in the chat
    template. `stream`: print words as they are generated. Beam search and `fixed_length` print the text at the end.
    Raises `ConfigError`: the prompt has no tokens, prompt and new tokens exceed the model's context, or there is no
    chat template, or it refuses the message."""
    if chat:
        prompt = render_chat([{"role": "user", "content": prompt}], tokenizer, add_generation_prompt=True)
    ids = tokenizer(prompt, add_special_tokens=not chat)["input_ids"]  # the template adds them
    if not ids:
        raise ConfigError("the prompt has no tokens; there is nothing to continue")
    check_context(context_of(model.config), prompt=len(ids), new=decoding.max_new_tokens)
    streamer = None
    if stream and decoding.beams == 1 and not decoding.fixed_length:
        streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    input_ids = torch.tensor([ids], dtype=torch.long, device=model.device)
    endless = {"eos_token_id": None} if decoding.fixed_length else {}
    set_seed(decoding.seed)
    try:
        output = model.generate(
            input_ids=input_ids,
            attention_mask=torch.ones_like(input_ids),
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
    new = output[0].tolist()[len(ids) :]
    if decoding.fixed_length:  # the text ends at the first end token, of the model or of the tokenizer
        ends = model.generation_config.eos_token_id
        ends = {*(ends if isinstance(ends, list) else [ends]), tokenizer.eos_token_id}
        new = list(takewhile(lambda token: token not in ends, new))
    text = str(tokenizer.decode(new, skip_special_tokens=True))
    if stream and streamer is None:
        print(text)
    return text
