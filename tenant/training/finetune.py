"""LoRA fine-tuning of a split model with TRL's trainers. `symbiosis-priv tenant finetune` runs it.

Only the loading of the model, the reading of the data and what is saved differ from ordinary fine-tuning with TRL.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any

import msgspec
from datasets import Dataset, disable_progress_bars
from peft import LoraConfig
from torch import nn
from transformers.integrations import get_reporting_integration_callbacks
from transformers.pytorch_utils import Conv1D
from trl import DPOConfig, SFTConfig, pack_dataset

from symbiosis_priv.checkpoints.checkpoint import resolve
from symbiosis_priv.checkpoints.discovery.skeleton import load_config
from symbiosis_priv.errors import ConfigError, FinishedError
from symbiosis_priv.federation import load_federation
from symbiosis_priv.system.interrupts import Interrupts
from tenant.model.hf import RemoteConfig, backend_of
from tenant.model.loading import load_language_model, load_tokenizer
from tenant.training.corpus import context_of, hold_out, read
from tenant.training.examples import Example, Preference, columns, make_examples, rows_of
from tenant.training.options import ALL_LINEAR, DEFAULT_BETA, FineTuning
from tenant.training.output import began_at, check_output, check_space, claimed, last_checkpoint, make_record, step_of
from tenant.training.trainer import PreferenceTrainer, Progress, TextTrainer

_DEFAULTS = FineTuning()


@dataclass(frozen=True, kw_only=True)
class FineTuned:
    """The result of a fine-tuning run.

    Args:
        loss_before, loss_after: loss on the held-out examples, or on all examples if none are held out.
        preferences: True if the losses are of preferences, not of tokens.
        cut: number of examples that were cut to the sequence length.
        left_out: number of examples with nothing to learn within the sequence length.
        progress: losses, tokens, seconds and the session's counters, without evaluation.
    """

    adapter: Path
    loss_before: float
    loss_after: float
    preferences: bool
    held_out: bool
    cut: int
    left_out: int
    progress: Progress


def finetune(
    model_path: str | Path,
    data: Path,
    output: Path,
    *,
    remote: RemoteConfig,
    options: FineTuning = _DEFAULTS,
    on_progress: Callable[[Progress], None] | None = None,
) -> FineTuned:
    """Fine-tune a LoRA adapter on a text or JSONL file and write it to `output` as an ordinary PEFT folder.

    Args:
        data: the training data; see `corpus.read`.
        output: a new or empty folder, unless `options.resume` is set.

    Raises:
        ConfigError: the data, the output folder or an option is invalid.
        FinishedError: the run to resume has made all its steps.
        SymbiosisError: loading or the session has failed. An exception that ends training early, a signal's included,
            has a note that says what is saved.
    """
    folder = resolve(model_path)
    _check_trackers(options.report_to)
    check_output(output, resume=options.resume, model=folder, checkpoint=remote.checkpoint, cache=remote.cache)
    context = context_of(load_config(folder))
    if context is not None and options.sequence_length > context:
        raise ConfigError(
            f"--sequence-length {options.sequence_length} is more than the model's context of {context:,}; choose fewer"
        )
    tokenizer = load_tokenizer(folder)
    if tokenizer.pad_token is None and tokenizer.eos_token is None:
        tokenizer.pad_token = tokenizer.convert_ids_to_tokens(0)  # TRL needs one; it is masked
    corpus = read(data)
    preferences = corpus.form == "preferences"
    if preferences and options.dropout:
        raise ConfigError("preferences are learned without --dropout; leave it out")
    if not preferences and options.beta is not None:
        raise ConfigError("--beta needs preferences: prompt, chosen and rejected on every line")
    if options.packing and corpus.form in ("text", "preferences"):
        raise ConfigError("--packing is for chats and for prompts with completions; leave it out")
    began = began_at(last_checkpoint(output) if options.resume else None)
    examples = make_examples(corpus, tokenizer, length=options.sequence_length, now=began)
    record = make_record(
        options,
        model=None if remote.federation is None else load_federation(Path(remote.federation)).model_digest,
        data=hashlib.sha256(msgspec.json.encode(rows_of(examples.found))).hexdigest(),
        began=began,
    )
    train, held_out = (_dataset(part, options) for part in hold_out(examples.found))
    steps_of_epoch = ceil(ceil(len(train) / options.batch_size) / options.gradient_accumulation)
    steps = options.steps or ceil(options.epochs * steps_of_epoch)
    start = last_checkpoint(output, of=record) if options.resume else None
    if start is not None and step_of(start) >= steps:
        raise FinishedError(f"finished: {output}, after step {step_of(start)} of {steps}; more --steps continue")
    with claimed(output), Interrupts() as interrupts:
        model = load_language_model(folder, remote=remote, dtype=options.dtype, tokenizer=tokenizer)
        backend = backend_of(model)
        try:
            lora = LoraConfig(
                task_type="CAUSAL_LM",
                target_modules=_targets(model, options.target_modules),
                r=options.rank,
                lora_alpha=record["alpha"],
                lora_dropout=options.dropout,
                fan_in_fan_out=any(isinstance(module, Conv1D) for module in model.modules()),
            )
            progress = Progress(on_progress)
            arguments: dict[str, Any] = {
                "output_dir": str(output),
                "max_steps": steps,
                "learning_rate": options.learning_rate,
                "per_device_train_batch_size": options.batch_size,
                "per_device_eval_batch_size": options.batch_size,
                "gradient_accumulation_steps": options.gradient_accumulation,
                "activation_checkpointing": options.gradient_checkpointing,
                "activation_checkpointing_kwargs": {"use_reentrant": False} if options.gradient_checkpointing else None,
                "save_strategy": "steps",
                "save_steps": options.save_every,
                "save_total_limit": 1,
                "seed": options.seed,
                "bf16": False,
                "include_num_input_tokens_seen": "all",
                "logging_steps": 1,
                "dataloader_pin_memory": False,
                "disable_tqdm": True,
                "report_to": list(options.report_to) or "none",
                "max_length": None,  # the examples are cut already
                "pad_to_multiple_of": options.pad_to_multiple_of,
                "router_aux_loss_coef": 0.0,  # routers are not trained
            }
            beta = DEFAULT_BETA if options.beta is None else options.beta
            trainer: Any = (PreferenceTrainer if preferences else TextTrainer)(
                output=output,
                record=record,
                progress=progress,
                interrupts=interrupts,
                model=model,
                args=DPOConfig(**arguments, beta=beta)
                if preferences
                else SFTConfig(**arguments, padding_free=options.packing),
                train_dataset=train,
                eval_dataset=held_out or train,
                processing_class=tokenizer,
                peft_config=lora,
            )
            # a checkpoint holds the adapter and AdamW's two averages; the adapter is also written beside it
            check_space(output, 4 * sum(one.nbytes for one in trainer.model.parameters() if one.requires_grad))
            if options.packing:
                trainer.check_packing()
            before, after = trainer.run(resume_from=start)
            return FineTuned(
                adapter=output,
                loss_before=before,
                loss_after=after,
                preferences=preferences,
                held_out=bool(held_out),
                cut=examples.cut,
                left_out=examples.left_out,
                progress=progress,
            )
        finally:
            backend.close()


def _dataset(examples: Sequence[Example | Preference], options: FineTuning) -> Any:
    """Return the data set that TRL's trainers take, or None without examples."""
    if not examples:
        return None
    disable_progress_bars()
    found: Any = Dataset.from_list([columns(one) for one in examples])
    return pack_dataset(found, options.sequence_length) if options.packing else found


def _targets(model: nn.Module, names: str) -> str | list[str]:
    """Return LoRA's targets. PEFT ignores a name that matches no linear if another name matches, so it is refused."""
    if names == ALL_LINEAR:
        return names
    targets = [name.strip() for name in names.split(",")]
    linears = [name for name, part in model.named_modules() if isinstance(part, (nn.Linear, Conv1D))]
    if unknown := [name for name in targets if not any(f".{one}".endswith(f".{name}") for one in linears)]:
        known = ", ".join(sorted({linear.rpartition(".")[2] for linear in linears}))
        raise ConfigError(
            f"--target-modules {', '.join(unknown)}: this model has no such linear; it has {known}; "
            f"{ALL_LINEAR} chooses all but the LM head"
        )
    return targets


def _check_trackers(names: Sequence[str]) -> None:
    """Refuse experiment trackers that transformers does not know, or whose package is not installed, before the model
    is loaded. A tracker sees losses and options, never data."""
    for name in names:
        try:
            for tracker in get_reporting_integration_callbacks([name]):
                tracker()
        except (ValueError, RuntimeError, ImportError) as error:
            raise ConfigError(f"--report-to {name}: {error}") from error
