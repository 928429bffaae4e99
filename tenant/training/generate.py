"""Generation and chats with a split model. `symbiosis-priv tenant generate` and `tenant chat` run it."""

from collections.abc import Callable
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedTokenizerBase, TextStreamer, set_seed
from transformers.cache_utils import DynamicLayer

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
    model: Any, tokenizer: PreTrainedTokenizerBase, prompt: str, *, decoding: Decoding = _GREEDY, stream: bool = False
) -> str:
    """Return the text that a model generates after a prompt. `stream`: print words as they are generated. Beam search
    and `fixed_length` print the text at the end. Raises `ConfigError`: the prompt has no tokens, or prompt and new
    tokens exceed the model's context."""
    ids = tokenizer(prompt)["input_ids"]
    return _Generation(model, tokenizer, decoding).text_after(ids, new_tokens=decoding.max_new_tokens, stream=stream)


class Conversation:
    """A conversation. The model reads each message once, because keys and values of earlier messages are kept."""

    def __init__(self, model: Any, tokenizer: PreTrainedTokenizerBase, *, decoding: Decoding = _GREEDY) -> None:
        self._generation = _Generation(model, tokenizer, decoding)
        self._tokenizer, self._decoding, self._context = tokenizer, decoding, context_of(model.config)
        self._messages: list[dict[str, str]] = []

    def answer(self, message: str, *, stream: bool = False, stop: Callable[[], bool] = lambda: False) -> str:
        """Return the model's answer to a message of the user. After an error, the conversation is as it was before.
        `stop`: called before each token; returns True to end the answer. Raises `ConfigError`: there is no chat
        template, the template refuses the message, or the conversation has filled the model's context."""
        asked = [*self._messages, {"role": "user", "content": message}]
        text = render_chat(asked, self._tokenizer, add_generation_prompt=True)
        prompt = self._tokenizer(text, add_special_tokens=False)["input_ids"]  # the template adds them
        new = self._decoding.max_new_tokens
        if self._context is not None and not self._decoding.fixed_length:
            new = min(new, max(1, self._context - len(prompt)))  # an answer ends with the context
        answer = self._generation.text_after(prompt, new_tokens=new, stream=stream, stop=stop)
        self._messages = [*asked, {"role": "assistant", "content": answer}]
        return answer


class _Generation:
    """Generates texts one after the other. Keys and values of a text are reused if the next prompt begins with it. A
    tokenizer may divide the text of an answer into other tokens than the model has generated. Its keys and values are
    then not reused; with `fixed_length`, those of the first equal tokens are."""

    def __init__(self, model: Any, tokenizer: PreTrainedTokenizerBase, decoding: Decoding) -> None:
        self._model, self._tokenizer, self._decoding = model, tokenizer, decoding
        self._read: list[int] = []  # the tokens whose keys and values are in the cache
        self._cache: DynamicCache | None = None

    def text_after(
        self, prompt: list[int], *, new_tokens: int, stream: bool, stop: Callable[[], bool] = lambda: False
    ) -> str:
        model, tokenizer, decoding = self._model, self._tokenizer, self._decoding
        if not prompt:
            raise ConfigError("the prompt has no tokens; there is nothing to continue")
        check_context(context_of(model.config), prompt=len(prompt), new=new_tokens)
        streamer = None
        if stream and decoding.beams == 1 and not decoding.fixed_length:
            streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
        input_ids = torch.tensor([prompt], dtype=torch.long, device=model.device)
        endless = {"eos_token_id": None} if decoding.fixed_length else {}
        cached, self._cache = self._cache, None  # generation changes the cache, and may fail
        common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(prompt, self._read, strict=False)))
        others = len(self._read) - min(common, len(prompt) - 1)
        if cached is not None and decoding.fixed_length and others:  # a whole prompt would show the answer's length
            cached.crop(-others)
            others = 0
        known = {} if cached is None or others else {"past_key_values": cached}
        set_seed(decoding.seed)
        try:
            output = model.generate(
                input_ids=input_ids,
                attention_mask=torch.ones_like(input_ids),
                max_new_tokens=new_tokens,
                do_sample=decoding.samples,
                temperature=decoding.temperature or None,
                top_p=decoding.top_p,
                num_beams=decoding.beams,
                trust_remote_code=False,  # generation_config.json may name code on the hub
                pad_token_id=tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id,
                return_dict_in_generate=True,
                stopping_criteria=[lambda ids, _: torch.full((len(ids),), stop(), dtype=torch.bool, device=ids.device)],
                **endless,
                **known,
                streamer=streamer,
            )
        except BaseException:
            if streamer is not None and streamer.token_cache:  # end the line before the error message
                streamer.end()
            raise
        new = output.sequences[0].tolist()[len(prompt) :]
        if decoding.fixed_length:  # the text ends at the first end token, of the model or of the tokenizer
            ends = model.generation_config.eos_token_id
            ends = {*(ends if isinstance(ends, list) else [ends]), tokenizer.eos_token_id}
            new = _up_to(ends, new)
        # the cache is kept if it has every token except the last, and only keys and values of attention: layers with a
        # state (linear attention) cannot read several tokens after it, and prompt tuning adds tokens
        tokens, cache = [*prompt, *new], output.get("past_key_values")
        plain = isinstance(cache, DynamicCache) and all(type(layer) is DynamicLayer for layer in cache.layers)
        if plain and decoding.beams == 1 and (behind := cache.get_seq_length() - len(tokens) + 1) >= 0:
            if behind:  # generated after the end of an answer of fixed length
                cache.crop(-behind)
            self._cache, self._read = cache, tokens[:-1]
        text = str(tokenizer.decode(new, skip_special_tokens=True))
        if stream and streamer is None:
            print(text)
        return text


def _up_to(ends: set[int | None], tokens: list[int]) -> list[int]:
    return list(takewhile(lambda token: token not in ends, tokens))
