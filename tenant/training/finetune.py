"""LoRA fine-tuning of a split model with Hugging Face's `Trainer`. `symbiosis-priv tenant finetune` runs it.

Only the loading of the model differs from ordinary fine-tuning with PEFT and `Trainer`.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import TrainingArguments, set_seed
from transformers.integrations import get_reporting_integration_callbacks, integration_utils
from transformers.pytorch_utils import Conv1D

from symbiosis_priv.checkpoints.checkpoint import resolve
from symbiosis_priv.checkpoints.discovery.skeleton import load_config
from symbiosis_priv.errors import ConfigError
from symbiosis_priv.federation import load_federation
from symbiosis_priv.system.interrupts import Interrupts
from tenant.model.hf import RemoteConfig, backend_of
from tenant.model.loading import load_language_model, load_tokenizer
from tenant.session.tally import Ledger
from tenant.training.corpus import NOT_LEARNED, Example, Preference, context_of, hold_out, load_examples, rows_of
from tenant.training.options import ALL_LINEAR, DEFAULT_BETA, FineTuning
from tenant.training.output import RunRecord, check_output, check_space, claimed, last_checkpoint, read_record
from tenant.training.trainer import PreferenceTrainer, Progress, ResumableTrainer, TrainingMeter

_DEFAULTS = FineTuning()


@dataclass(frozen=True, kw_only=True)
class FineTuned:
    """The result of a fine-tuning run.

    Args:
        losses: loss of each step, in nats per token.
        loss_before, loss_after: loss on the held-out examples, or on all examples if none are held out.
        preferences: True if the losses are of preferences, not of tokens.
        held_out: True if `loss_before` and `loss_after` are of held-out examples.
        shortened: number of examples that were cut to the sequence length.
        tokens, seconds: training tokens and time, without evaluation.
        ledger: the session's counters during training; None without a session ("simulate", "paper-pool").
    """

    adapter: Path
    losses: tuple[float, ...]
    loss_before: float
    loss_after: float
    preferences: bool
    held_out: bool
    shortened: int
    tokens: int
    seconds: float
    ledger: Ledger | None


def finetune(
    model_path: str | Path,
    data: Path,
    output: Path,
    *,
    remote: RemoteConfig,
    options: FineTuning = _DEFAULTS,
    on_progress: Progress | None = None,
) -> FineTuned:
    """Fine-tune a LoRA adapter on a text or JSONL file and write it to `output` as an ordinary PEFT folder.

    Args:
        data: the training data; see `corpus.load_examples`.
        output: a new or empty folder, unless `options.resume` is set.

    Raises:
        ConfigError: the data, the output folder or an option is invalid.
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
    examples, shortened = load_examples(data, tokenizer, length=options.sequence_length)
    preferences = isinstance(examples[0], Preference)
    if preferences and (options.dropout or options.overlap > 1):
        raise ConfigError("preferences are learned without --dropout and --overlap; leave them out")
    if not preferences and options.beta is not None:
        raise ConfigError("--beta needs preferences: input, preferred_output and non_preferred_output on every line")
    tokens = msgspec.json.encode([(row.input_ids, row.labels) for row in rows_of(examples)])
    settings = {name: getattr(options, name) for name in RunRecord.__struct_fields__ if hasattr(options, name)}
    record = RunRecord(
        model=None if remote.federation is None else load_federation(Path(remote.federation)).model_digest,
        data=hashlib.sha256(tokens).hexdigest(),
        **settings | {"alpha": 2 * options.rank if options.alpha is None else options.alpha},
    )
    start = last_checkpoint(output) if options.resume else None
    if start is not None:
        record.check_continues(read_record(start))
    train, held_out = hold_out(examples)
    with claimed(output), Interrupts() as interrupts:
        model = load_language_model(folder, remote=remote, dtype=options.dtype, tokenizer=tokenizer)
        backend = backend_of(model)
        try:
            targets: str | list[str] = options.target_modules
            if targets != ALL_LINEAR:  # PEFT ignores a name that matches no linear if another name matches
                targets = [name.strip() for name in options.target_modules.split(",")]
                linears = [name for name, part in model.named_modules() if isinstance(part, (nn.Linear, Conv1D))]
                unknown = [name for name in targets if not any(f".{one}".endswith(f".{name}") for one in linears)]
                if unknown:
                    known = ", ".join(sorted({linear.rpartition(".")[2] for linear in linears}))
                    raise ConfigError(
                        f"--target-modules {', '.join(unknown)}: this model has no such linear; it has {known}; "
                        f"{ALL_LINEAR} chooses all but the LM head"
                    )
            set_seed(options.seed)
            lora = LoraConfig(
                task_type="CAUSAL_LM",
                target_modules=targets,
                r=record.rank,
                lora_alpha=record.alpha,
                lora_dropout=options.dropout,
                fan_in_fan_out=any(isinstance(module, Conv1D) for module in model.modules()),
            )
            peft_model = get_peft_model(model, lora)
            # a checkpoint holds the adapter and AdamW's two averages; the adapter is also written beside it
            check_space(output, 4 * sum(one.nbytes for one in peft_model.parameters() if one.requires_grad))
            meter = TrainingMeter(peft_model, on_progress)
            beta = DEFAULT_BETA if options.beta is None else options.beta
            trainer = (partial(PreferenceTrainer, beta=beta) if preferences else ResumableTrainer)(
                output=output,
                record=record,
                interrupts=interrupts,
                overlap=options.overlap,
                model=peft_model,
                args=TrainingArguments(
                    output_dir=str(output),
                    max_steps=options.steps or -1,
                    num_train_epochs=options.epochs,
                    learning_rate=options.learning_rate,
                    per_device_train_batch_size=options.batch_size,
                    per_device_eval_batch_size=options.batch_size,
                    gradient_accumulation_steps=options.gradient_accumulation,
                    activation_checkpointing=options.gradient_checkpointing,  # as transformers 5 names it
                    activation_checkpointing_kwargs={"use_reentrant": False}
                    if options.gradient_checkpointing
                    else None,
                    save_strategy="steps",
                    save_steps=options.save_every,
                    save_total_limit=1,
                    seed=options.seed,
                    include_num_input_tokens_seen="all",
                    logging_steps=1,
                    dataloader_pin_memory=False,
                    remove_unused_columns=False,
                    disable_tqdm=True,
                    report_to=list(options.report_to) or "none",
                ),
                train_dataset=train,
                eval_dataset=held_out or train,
                data_collator=partial(collate, multiple=options.pad_to_multiple_of),
                callbacks=[meter],
            )
            before, after = trainer.run(resume_from=start)
            return FineTuned(
                adapter=output,
                losses=tuple(meter.losses),
                loss_before=before,
                loss_after=after,
                preferences=preferences,
                held_out=bool(held_out),
                shortened=shortened,
                tokens=meter.tokens,
                seconds=meter.seconds,
                ledger=meter.ledger,
            )
        finally:
            backend.close()


def collate(examples: Sequence[Example | Preference], *, multiple: int = 1) -> dict[str, Tensor]:
    """Make a batch of examples, each padded at the end to the length of the longest. A preference is two rows.

    Args:
        multiple: the length is rounded up to a multiple of this number of tokens. Providers see only the rounded
            length.

    Returns:
        input_ids, labels and, if an example is padded, attention_mask; each is int64 `[rows, tokens]`.
    """
    each = rows_of(examples)
    lengths = [len(row.input_ids) for row in each]
    longest = -(-max(lengths) // multiple) * multiple

    def padded(rows: Sequence[Sequence[int]], value: int) -> Tensor:
        return torch.tensor([[*row, *[value] * (longest - len(row))] for row in rows], dtype=torch.long, device="cpu")

    batch = {
        "input_ids": padded([row.input_ids for row in each], 0),
        "labels": padded([row.labels for row in each], NOT_LEARNED),
    }
    if min(lengths) < longest:
        batch["attention_mask"] = padded([[1] * length for length in lengths], 0)
    return batch


def _check_trackers(names: Sequence[str]) -> None:
    """Refuse experiment trackers that transformers does not know, or whose package is not installed, before the model
    is loaded. A tracker sees losses and options, never data."""
    known = sorted(integration_utils.INTEGRATION_TO_CALLBACK)
    for name in names:
        if name not in known:
            raise ConfigError(f"--report-to {name} is unknown; choose from {', '.join(known)}")
        (callback,) = get_reporting_integration_callbacks([name])
        try:
            callback()
        except (RuntimeError, ImportError) as error:
            raise ConfigError(f"--report-to {name}: {error}") from error
