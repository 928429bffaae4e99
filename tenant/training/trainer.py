"""Hugging Face's `Trainer`, with a way out: whatever ends a run early, the steps that it has completed are saved.

Theory of operation. A run ends early by a signal, a lost provider or a full disk. In the forward and backward pass the
adapter and the optimizer are exactly what the last completed step has left, so that is where signals are let through,
and a checkpoint can still be written; anywhere else (the optimizer's step, a checkpoint half written) they wait.
Torch's generator goes back to where that step had left it: a resumed run gives the bits of one that went through.
"""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

from symbiosis_priv.checkpoints.vetting import vet_adapter
from symbiosis_priv.errors import CheckpointError, ConfigError, StorageError, SymbiosisError, one_line
from symbiosis_priv.system.files import storing
from symbiosis_priv.system.interrupts import Interrupts
from tenant.model.ledger import ledger_of, since
from tenant.training.output import RunRecord, is_whole, last_checkpoint, save_adapter, write_record

_STATES = ("optimizer.pt", "scheduler.pt", "rng_state.pth")
_ANEW = "delete it, or start anew in another --output"
_SHOWN = 160  # letters of somebody else's message

Progress = Callable[[int, int, float], None]
"""Called after every step with (steps done, steps in all, loss in nats per token)."""


class ResumableTrainer(Trainer):
    """See the module's text.

    Args:
        output: the run's folder.
        record: what later runs are compared with before they go on from this one.
        interrupts: open; says when signals may arrive.
        options: of `Trainer`.
    """

    def __init__(self, *, output: Path, record: RunRecord, interrupts: Interrupts, **options: Any) -> None:
        super().__init__(**options)
        self.remove_callback(PrinterCallback)
        self._random = _RandomState()
        self.add_callback(self._random)
        self._output = output
        self._record = record
        self._interrupts = interrupts

    def run(self, *, resume_from: Path | None) -> tuple[float, float]:
        """Train, and leave the adapter in the output folder.

        Returns:
            the evaluation loss before and after, in nats per token.

        Raises:
            CheckpointError: a file of the checkpoint to go on from is damaged, or would run code.
            BaseException: whatever ended the run early; a note on it says what is saved.
        """
        if resume_from is not None:
            vet_adapter(resume_from)
            if missing := [name for name in _STATES if not (resume_from / name).is_file()]:
                raise CheckpointError(f"{resume_from} has no {missing[0]}; {_ANEW}")  # it would go on without it
        with self._interrupts.whole():
            try:
                before = self._loss()
                self.train(resume_from_checkpoint=None if resume_from is None else str(resume_from))
                save_adapter(self.model, self._output)
                return before, self._loss()
            except BaseException as error:
                error.add_note(self._rescue())
                raise

    def training_step(self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None) -> Tensor:
        """The part of a step that changes neither adapter nor optimizer."""
        with self._interrupts.anywhere():
            return super().training_step(model, inputs, num_items_in_batch)

    def _loss(self) -> float:
        with self._interrupts.anywhere():
            return float(self.evaluate()["eval_loss"])

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        with _reading(resume_from_checkpoint):
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        with _reading(checkpoint):
            super()._load_optimizer_and_scheduler(checkpoint)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        with _reading(checkpoint):
            super()._load_rng_state(checkpoint)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        checkpoint = self._output / f"checkpoint-{self.state.global_step}"
        if is_whole(checkpoint):
            return
        try:
            with storing(checkpoint):
                write_record(checkpoint, self._record)
                try:
                    super()._save_checkpoint(model, trial)
                except RuntimeError as error:  # torch.save's way to say that a disk is full
                    raise OSError(one_line(str(error))) from error
        except BaseException:
            shutil.rmtree(checkpoint, ignore_errors=True)  # of no use, and somebody needs the room
            raise

    def _save_rng_state(self, output_dir: str) -> None:
        """The last file before trainer_state.json, which makes a checkpoint whole.

        The adapter is refreshed here, so that it is never older than the newest whole checkpoint, even after SIGKILL.
        """
        super()._save_rng_state(output_dir)
        save_adapter(self.model, self._output)

    def _rescue(self) -> str:
        """Save what can be saved, and say what that is."""
        done, total = self.state.global_step, self.state.max_steps
        if not done:
            return "nothing is saved: no step was completed"
        try:
            self._random.restore()
            assert self.model is not None
            self._save_checkpoint(self.model, trial=None)
            save_adapter(self.model, self._output)
            return f"saved: {self._output}, after step {done} of {total}; the same command with --resume goes on"
        except StorageError:
            try:
                last = last_checkpoint(self._output)
            except ConfigError:
                return "nothing is saved: no checkpoint could be written"
            return f"saved before: {last}; once there is room, the same command with --resume goes on from it"


@contextlib.contextmanager
def _reading(checkpoint: str | None) -> Iterator[None]:
    """Trainer reads numbers and containers from a checkpoint's pickles, and refuses whatever would run code."""
    try:
        yield
    except SymbiosisError:
        raise
    except Exception as error:  # whatever torch and PEFT make of such a file
        raise CheckpointError(f"{checkpoint} is damaged ({one_line(str(error))[:_SHOWN]}); {_ANEW}") from error


class _RandomState(TrainerCallback):
    """Torch's generator as the last completed step has left it."""

    def __init__(self) -> None:
        self._state = torch.get_rng_state()

    def on_step_end(self, args: TrainingArguments, state: Any, control: Any, **kwargs: Any) -> None:
        self._state = torch.get_rng_state()

    def restore(self) -> None:
        torch.set_rng_state(self._state)


class TrainingMeter(TrainerCallback):
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
