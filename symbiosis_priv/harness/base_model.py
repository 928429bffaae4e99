"""Pretrains a small Llama on synthetic public text, for the demo, the threat model and the tests.

The result is an ordinary Hugging Face checkpoint (safetensors, `config.json`, `tokenizer.json`).
"""

import contextlib
import hashlib
import math
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.processors import TemplateProcessing
from tokenizers.trainers import BpeTrainer
from transformers import LlamaForCausalLM, MixtralForCausalLM, PreTrainedTokenizerFast

from symbiosis_priv.errors import ConfigError
from symbiosis_priv.harness.text import public_text

Progress = Callable[[int, int, float], None]
"""Called after every step with (steps done, steps in all, loss in nats per token)."""

_BOS, _EOS, _PAD = "<|begin|>", "<|end|>", "<|pad|>"
_WARM_UP = 20  # steps


@dataclass(frozen=True, kw_only=True)
class Pretraining:
    """Sizes, training settings and seed of the base model.

    Attributes:
        steps: optimizer steps.
        batch: windows per step.
        window: tokens per window.
        peak_lr: AdamW's learning rate after warm-up; a cosine takes it to zero.
        sentences: sentences of public text to learn from.
        vocab: tokens of the byte-level BPE, at least 259 (the bytes and three special tokens).
        width: width of the model, a multiple of 32.
        blocks: number of blocks of the model.
        experts: experts of every block, two of which each token goes to; 0 for a model without experts.
        tied: True if the LM head is the embedding, and therefore stays with the tenant.
        seed: seed of the text, the initial weights and the order of the windows.
    """

    steps: int = 120
    batch: int = 8
    window: int = 128
    peak_lr: float = 3e-3
    sentences: int = 8_000
    vocab: int = 1024
    width: int = 256
    blocks: int = 4
    experts: int = 0
    tied: bool = True
    seed: int = 0

    def text(self) -> str:
        """The text that the model is trained on."""
        return public_text(seed=self.seed, sentences=self.sentences)


def cached_base_model(
    cache: Path, scratch: Path, *, on_progress: Progress | None = None, recipe: Pretraining = Pretraining()
) -> Path:
    """Call `make_base_model` once, and return the model in `cache` afterwards.

    A model in the cache never changes, so several processes may use it at once. A cache that cannot be written is not
    used.

    Args:
        cache: folder of base models; created if it is missing.
        scratch: empty folder for a model that is not in the cache yet.
    """
    digest = hashlib.sha256(f"{recipe}\n{recipe.text()}".encode()).hexdigest()
    kept = cache / f"base-model-{digest[:16]}"
    if kept.is_dir():
        return kept
    made = make_base_model(scratch / "base-model", on_progress=on_progress, recipe=recipe)
    with contextlib.suppress(OSError):  # the cache cannot be written, or another process was faster
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache, prefix=".base-model-") as staging:
            Path(shutil.copytree(made, Path(staging) / "model")).rename(kept)
    return made


def make_base_model(
    directory: Path, *, on_progress: Progress | None = None, recipe: Pretraining = Pretraining()
) -> Path:
    """Pretrain the base model, and return the folder of its checkpoint.

    The checkpoint is written atomically. Its weights are deterministic on one machine, and close but not equal across
    machines.

    Args:
        directory: folder of the checkpoint; missing or empty.

    Raises:
        ConfigError: `directory` is not empty.
    """
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise ConfigError(f"{directory} is in use; name an empty or new directory for the base model")
    paragraphs = recipe.text().split("\n\n")
    tokenizer = _train_tokenizer(paragraphs, vocab=recipe.vocab)
    encoded = tokenizer([paragraph + _EOS for paragraph in paragraphs])["input_ids"]
    tokens = torch.tensor([token for paragraph in encoded for token in paragraph], dtype=torch.long, device="cpu")
    model = _pretrain(tokens, tokenizer, recipe, on_progress=on_progress)
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory.parent, prefix=f".{directory.name}.") as scratch:
        staged = Path(scratch) / "model"
        model.save_pretrained(staged)
        tokenizer.save_pretrained(staged)
        staged.rename(directory)
    return directory


def _train_tokenizer(texts: list[str], *, vocab: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE: every string has an encoding, and decoding returns the same string."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevelDecoder()
    trainer = BpeTrainer(
        vocab_size=vocab, special_tokens=[_BOS, _EOS, _PAD], initial_alphabet=ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = TemplateProcessing(
        single=f"{_BOS} $A", special_tokens=[(_BOS, tokenizer.token_to_id(_BOS))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=_BOS, eos_token=_EOS, pad_token=_PAD, clean_up_tokenization_spaces=False
    )


def _pretrain(
    tokens: torch.Tensor, tokenizer: PreTrainedTokenizerFast, recipe: Pretraining, *, on_progress: Progress | None
) -> Any:
    kind: Any = MixtralForCausalLM if recipe.experts else LlamaForCausalLM
    config = kind.config_class(
        vocab_size=len(tokenizer),
        hidden_size=recipe.width,
        intermediate_size=recipe.width * 43 // 16,
        num_hidden_layers=recipe.blocks,
        num_attention_heads=recipe.width // 16,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=recipe.tied,
        initializer_range=0.05,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        **({"num_local_experts": recipe.experts} if recipe.experts else {}),
    )
    with torch.random.fork_rng(devices=[]):  # the caller's random state stays as it is
        torch.manual_seed(recipe.seed)
        model = kind(config)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    windows = tokens.unfold(0, recipe.window, 1)
    order = torch.Generator().manual_seed(recipe.seed)
    for step in range(recipe.steps):
        for group in optimizer.param_groups:
            cosine = (1 + math.cos(math.pi * step / recipe.steps)) / 2
            group["lr"] = recipe.peak_lr * min(1, (step + 1) / _WARM_UP) * cosine
        batch = torch.randint(len(windows), (recipe.batch,), generator=order, dtype=torch.long, device="cpu")
        input_ids = windows[batch]
        loss = model(input_ids=input_ids, labels=input_ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if on_progress is not None:
            on_progress(step + 1, recipe.steps, loss.item())
    model.eval()
    return model
