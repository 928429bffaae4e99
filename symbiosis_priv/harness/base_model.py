"""The demo's base model: a Llama of three million parameters, pretrained on the spot on public text.

What comes out is an ordinary Hugging Face checkpoint (safetensors, `config.json`, `tokenizer.json`) that
`AutoModelForCausalLM` and `AutoTokenizer` read. Nothing in it knows that its linears will run elsewhere.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.processors import TemplateProcessing
from tokenizers.trainers import BpeTrainer
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from symbiosis_priv.errors import ConfigError
from symbiosis_priv.harness.text import public_text

__all__ = ["Pretraining", "Progress", "cached_base_model", "make_base_model"]

Progress = Callable[[int, int, float], None]
"""Called after every step with (steps done, steps in all, loss in nats per token)."""

_BOS, _EOS, _PAD = "<|begin|>", "<|end|>", "<|pad|>"


@dataclass(frozen=True, kw_only=True)
class Pretraining:
    """How the base model is made.

    Attributes:
        steps: optimizer steps.
        batch: windows per step.
        window: tokens per window.
        peak_lr: AdamW's learning rate after warm-up; a cosine takes it to zero.
        sentences: sentences of public text to learn from.
        vocab: tokens of the byte-level BPE, at least 259 (the bytes and three special tokens).
        width: of the model, a multiple of 16.
        blocks: how many it has.
        seed: of the text, the initial weights and the order of the windows.
    """

    steps: int = 260
    batch: int = 8
    window: int = 128
    peak_lr: float = 3e-3
    sentences: int = 16_000
    vocab: int = 1024
    width: int = 256
    blocks: int = 4
    seed: int = 0

    def text(self) -> str:
        """What the model learns from."""
        return public_text(seed=self.seed, sentences=self.sentences)

    @property
    def digest(self) -> str:
        """Hex, of everything that decides what comes out."""
        return hashlib.sha256(f"{self}\n{self.text()}".encode()).hexdigest()


def cached_base_model(
    cache: Path, scratch: Path, *, on_progress: Progress | None = None, recipe: Pretraining = Pretraining()
) -> Path:
    """`make_base_model` once, and from `cache` ever after.

    What is in the cache never changes, so any number of callers may use it at once. A model that time cut short is not
    kept, and a cache that cannot be written is done without.

    Args:
        cache: where base models are kept; made if it is missing.
        scratch: an empty folder for one that is not there yet.
        on_progress: called after every step, see `Progress`.
        recipe: sizes and seed.
    """
    kept = cache / f"base-model-{recipe.digest[:16]}"
    if kept.is_dir():
        return kept
    taken = 0

    def count(done: int, total: int, loss: float) -> None:
        nonlocal taken
        taken = done
        if on_progress is not None:
            on_progress(done, total, loss)

    made = make_base_model(scratch / "base-model", on_progress=count, recipe=recipe)
    if taken == recipe.steps:
        with contextlib.suppress(OSError):  # it cannot be written, or somebody else was faster
            cache.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=cache, prefix=".base-model-") as staging:
                Path(shutil.copytree(made, Path(staging) / "model")).rename(kept)
    return made


def make_base_model(
    directory: Path,
    *,
    seconds: float = 100,
    on_progress: Progress | None = None,
    recipe: Pretraining = Pretraining(),
) -> Path:
    """Pretrain the base model into `directory`, and return that.

    The checkpoint appears whole or not at all: it is written beside `directory` and renamed. Its weights
    are deterministic on one machine as long as `seconds` is ample, and close but not equal across machines.

    Args:
        directory: where the checkpoint goes; missing or empty.
        seconds: training never runs past this. A slow or busy machine takes fewer steps, but the learning
            rate still comes down in time, so it gets a somewhat weaker model and not a broken one.
        on_progress: called after every step, see `Progress`.
        recipe: sizes and seed.

    Raises:
        ConfigError: `directory` holds something.
    """
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise ConfigError(f"{directory} is in use; name an empty or new directory for the demo's base model")
    text = recipe.text()
    tokenizer = _train_tokenizer(text.split("\n\n"), vocab=recipe.vocab)
    model = _pretrain(_encode(tokenizer, text), tokenizer, recipe, seconds=seconds, on_progress=on_progress)
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory.parent, prefix=f".{directory.name}.") as scratch:
        staged = Path(scratch) / "model"
        model.save_pretrained(staged)
        tokenizer.save_pretrained(staged)
        staged.rename(directory)
    return directory


def _train_tokenizer(texts: list[str], *, vocab: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE: every string has an encoding, and decoding gives back the very same string."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevelDecoder()
    trainer = BpeTrainer(
        vocab_size=vocab,
        special_tokens=[_BOS, _EOS, _PAD],
        initial_alphabet=ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = TemplateProcessing(
        single=f"{_BOS} $A", special_tokens=[(_BOS, tokenizer.token_to_id(_BOS))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=_BOS,
        eos_token=_EOS,
        pad_token=_PAD,
        clean_up_tokenization_spaces=False,
    )


def _encode(tokenizer: PreTrainedTokenizerFast, text: str) -> torch.Tensor:
    """One stream of token ids, int64 `[tokens]`: begin, paragraph, end, begin, ..."""
    paragraphs = tokenizer([paragraph + _EOS for paragraph in text.split("\n\n")])["input_ids"]
    tokens = [token for paragraph in paragraphs for token in paragraph]
    return torch.tensor(tokens, dtype=torch.long, device="cpu")


def _pretrain(
    tokens: torch.Tensor,
    tokenizer: PreTrainedTokenizerFast,
    recipe: Pretraining,
    *,
    seconds: float,
    on_progress: Progress | None,
) -> LlamaForCausalLM:
    with torch.random.fork_rng(devices=[]):  # the caller's random state is none of our business
        torch.manual_seed(recipe.seed)
        model = LlamaForCausalLM(_config(tokenizer, recipe))
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    started = time.monotonic()
    for step, input_ids in enumerate(_batches(tokens, recipe)):
        # Whichever is further along, the steps or the clock, brings the learning rate down. Cubed, the
        # clock stays behind unless time really runs short: otherwise the steps alone decide the weights.
        done = max(step / recipe.steps, ((time.monotonic() - started) / seconds) ** 3)
        if done >= 1:
            break
        for group in optimizer.param_groups:
            group["lr"] = recipe.peak_lr * min(1, (step + 1) / 20) * (1 + math.cos(math.pi * done)) / 2
        loss = model(input_ids=input_ids, labels=input_ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if on_progress is not None:
            on_progress(step + 1, recipe.steps, loss.item())
    model.eval()
    return model


def _config(tokenizer: PreTrainedTokenizerFast, recipe: Pretraining) -> LlamaConfig:
    """Grouped-query attention (8 heads on 2), and a tied head, which therefore stays with the tenant."""
    return LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=recipe.width,
        intermediate_size=recipe.width * 43 // 16,
        num_hidden_layers=recipe.blocks,
        num_attention_heads=8,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


def _batches(tokens: torch.Tensor, recipe: Pretraining) -> Iterator[torch.Tensor]:
    """`recipe.steps` batches of int64 `[batch, window]`, each window from a random place."""
    windows = tokens.unfold(0, recipe.window, 1)
    generator = torch.Generator().manual_seed(recipe.seed)
    for _ in range(recipe.steps):
        size = (recipe.batch,)
        yield windows[torch.randint(len(windows), size, generator=generator, dtype=torch.long, device="cpu")]
