"""LoRA fine-tuning of a split model with Hugging Face's `Trainer`; what `symbiosis-priv tenant finetune` runs.

Only the loading of the model is special: the rest is PEFT and `Trainer` as everybody uses them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import (
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)
from transformers.pytorch_utils import Conv1D
from transformers.trainer_utils import get_last_checkpoint

from symbiosis_priv.errors import ConfigError
from tenant.config import RemoteConfig
from tenant.corpus import hold_out, read_documents, to_blocks
from tenant.hf import backend_of
from tenant.ledger import ledger_of, since
from tenant.loading import load_model, load_tokenizer
from tenant.session import Ledger

Progress = Callable[[int, int, float], None]
"""Called after every step with (steps done, steps in all, loss in nats per token)."""


@dataclass(frozen=True, kw_only=True)
class FineTuning:
    """How to fine-tune.

    Args:
        steps: optimizer steps; None to go by `epochs`.
        epochs: passes over the text.
        rank: of LoRA, on every linear but the LM head; alpha is twice that.
        learning_rate: AdamW's; decays linearly to 0.
        batch_size: blocks per forward pass.
        gradient_accumulation: forward passes per step.
        gradient_checkpointing: recompute activations in the backward pass: less memory, more round trips.
        sequence_length: tokens per block.
        seed: of the adapter's initial values and of the order of the blocks. Masks never depend on it.
        save_every: steps between checkpoints to resume from.
        resume: go on from the last checkpoint in the output folder.
        dtype: of the tenant's own tensors; "auto" for the checkpoint's.
    """

    steps: int | None = None
    epochs: float = 1.0
    rank: int = 8
    learning_rate: float = 2e-4
    batch_size: int = 4
    gradient_accumulation: int = 1
    gradient_checkpointing: bool = False
    sequence_length: int = 256
    seed: int = 0
    save_every: int = 50
    resume: bool = False
    dtype: str = "auto"


@dataclass(frozen=True, kw_only=True)
class FineTuned:
    """What came out.

    Args:
        adapter: the PEFT folder.
        losses: of every step, nats per token.
        loss_before, loss_after: on the held-out blocks, or on all of them if the text is too short to hold any out.
        held_out: which of the two it was.
        tokens, seconds: of training alone.
        ledger: of training alone; None if there was no session ("simulate", "paper-pool").
    """

    adapter: Path
    losses: tuple[float, ...]
    loss_before: float
    loss_after: float
    held_out: bool
    tokens: int
    seconds: float
    ledger: Ledger | None


def finetune(
    model_path: str | Path,
    text: Path,
    output: Path,
    *,
    remote: RemoteConfig,
    options: FineTuning = FineTuning(),
    on_progress: Progress | None = None,
) -> FineTuned:
    """Fine-tune a LoRA adapter on a text file and write it to `output` as an ordinary PEFT folder.

    Raises:
        ConfigError: the text, the output folder or an option does not do.
        SymbiosisError: whatever loading and the session raise.
    """
    _check_output(output, resume=options.resume)
    blocks = to_blocks(read_documents(text), load_tokenizer(model_path), length=options.sequence_length)
    train, held_out = hold_out(blocks)
    model = load_model(model_path, remote=remote, dtype=options.dtype)
    backend = backend_of(model)
    try:
        _check_length(model, options.sequence_length)
        set_seed(options.seed)
        lora = LoraConfig(
            task_type="CAUSAL_LM",
            target_modules="all-linear",
            r=options.rank,
            lora_alpha=2 * options.rank,
            fan_in_fan_out=any(isinstance(module, Conv1D) for module in model.modules()),
        )
        peft_model = get_peft_model(model, lora)
        meter = _Meter(peft_model, on_progress)
        trainer = Trainer(
            model=peft_model,
            args=_arguments(output, options),
            train_dataset=_dataset(train),
            eval_dataset=_dataset(held_out or train),
            callbacks=[meter],
        )
        trainer.remove_callback(PrinterCallback)
        before = trainer.evaluate()["eval_loss"]
        trainer.train(resume_from_checkpoint=options.resume)
        after = trainer.evaluate()["eval_loss"]
        peft_model.save_pretrained(str(output))
        return FineTuned(
            adapter=output,
            losses=tuple(meter.losses),
            loss_before=before,
            loss_after=after,
            held_out=bool(held_out),
            tokens=meter.tokens,
            seconds=meter.seconds,
            ledger=meter.ledger,
        )
    finally:
        backend.close()


class _Meter(TrainerCallback):
    """Measures training alone, without the evaluations around it."""

    def __init__(self, model: nn.Module, report: Progress | None) -> None:
        self._model = model
        self._report = report
        self.losses: list[float] = []
        self.tokens = 0
        self.seconds = 0.0
        self.ledger = ledger_of(model)

    def on_train_begin(self, args: TrainingArguments, state: Any, control: Any, **kwargs: Any) -> None:
        self.tokens = -int(state.num_input_tokens_seen)  # a resumed run starts with those of the runs before
        self.ledger = ledger_of(self._model)
        self.seconds = -time.perf_counter()

    def on_train_end(self, args: TrainingArguments, state: Any, control: Any, **kwargs: Any) -> None:
        self.seconds += time.perf_counter()
        self.tokens += int(state.num_input_tokens_seen)
        now = ledger_of(self._model)
        self.ledger = since(self.ledger, now) if self.ledger and now else None

    def on_log(self, args: TrainingArguments, state: Any, control: Any, **kwargs: Any) -> None:
        loss = kwargs["logs"].get("loss")
        if loss is not None:
            self.losses.append(float(loss))
            if self._report:
                self._report(state.global_step, state.max_steps, float(loss))


def _arguments(output: Path, options: FineTuning) -> TrainingArguments:
    return TrainingArguments(
        output_dir=str(output),
        max_steps=options.steps or -1,
        num_train_epochs=options.epochs,
        learning_rate=options.learning_rate,
        per_device_train_batch_size=options.batch_size,
        per_device_eval_batch_size=options.batch_size,
        gradient_accumulation_steps=options.gradient_accumulation,
        activation_checkpointing=options.gradient_checkpointing,  # its name since transformers 5
        activation_checkpointing_kwargs={"use_reentrant": False} if options.gradient_checkpointing else None,
        save_strategy="steps",
        save_steps=options.save_every,
        save_total_limit=1,
        seed=options.seed,
        include_num_input_tokens_seen="all",
        logging_steps=1,
        dataloader_pin_memory=False,
        disable_tqdm=True,
        report_to="none",
    )


def _dataset(blocks: list[list[int]]) -> Any:
    return [{"input_ids": block, "labels": block} for block in blocks]


def _check_output(output: Path, *, resume: bool) -> None:
    last = get_last_checkpoint(str(output)) if output.is_dir() else None
    if resume and last is None:
        raise ConfigError(f"{output} holds no checkpoint to resume from; leave --resume out to start")
    if not resume and ((output / "adapter_config.json").exists() or last is not None):
        raise ConfigError(f"{output} holds an adapter or its checkpoints; choose another folder, or pass --resume")


def _check_length(model: Any, length: int) -> None:
    limit = getattr(model.config, "max_position_embeddings", None)
    if limit is not None and length > limit:
        raise ConfigError(f"sequence_length = {length} is more than the model's {limit} positions")
