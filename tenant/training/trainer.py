"""TRL's `SFTTrainer` and `DPOTrainer`, extended to save all completed steps when a run ends early.

Theory of operation. A run ends early by a signal, a lost provider or a full disk. In the forward and backward pass,
adapter and optimizer are in the state after the last completed step, so a checkpoint can be written there. Signals are
therefore delivered in the forward and backward pass only, and wait elsewhere (during the optimizer's step, or while a
checkpoint is written). Before the checkpoint, torch's random generator is set back to its state after the last
completed step, so that a resumed run gives the same bits as an uninterrupted run.
"""

import contextlib
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainerState, TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME
from trl import DPOTrainer, SFTTrainer

from symbiosis_priv.checkpoints.vetting import vet_adapter
from symbiosis_priv.errors import CheckpointError, ConfigError, StorageError, SymbiosisError, one_line
from symbiosis_priv.system.files import storing
from symbiosis_priv.system.interrupts import Interrupts
from tenant.model.all_logits import compute_all_logits
from tenant.model.ledger import ledger_of, since
from tenant.model.loading import load_adapter_tensors, shortened
from tenant.session.tally import Ledger
from tenant.training.examples import NOT_LEARNED
from tenant.training.output import Record, is_whole, last_checkpoint, save_adapter, write_record

_STATES = ("optimizer.pt", "scheduler.pt", "rng_state.pth")
_ANEW = "delete it, or start a new run in another --output"


class Progress(TrainerCallback):
    """The figures of a run so far, without the evaluations before and after it.

    Attributes:
        done, total: number of steps, earlier runs included.
        losses: of each step of this run, in nats per token.
        ledger: the session's counters in this run; None without a session ("simulate", "paper-pool").
        random: state of torch's random generator after the last completed step.
    """

    def __init__(self, report: Callable[["Progress"], None] | None) -> None:
        self._report = report
        self._began, self._tokens_before, self._ledger_before = 0.0, 0, Ledger()
        self.done = self.total = self.tokens = 0
        self.seconds = 0.0
        self.losses: list[float] = []
        self.ledger: Ledger | None = None
        self.random = torch.get_rng_state()

    def on_step_end(self, args: TrainingArguments, state: Any, control: Any, **kwargs: Any) -> None:
        self.random = torch.get_rng_state()

    def on_train_begin(self, args: TrainingArguments, state: Any, control: Any, **kwargs: Any) -> None:
        self._tokens_before = state.num_input_tokens_seen  # of earlier runs
        self._ledger_before = ledger_of(kwargs["model"]) or Ledger()
        self._began = time.perf_counter()

    def on_train_end(self, args: TrainingArguments, state: Any, control: Any, **kwargs: Any) -> None:
        self.done, self.total = state.global_step, state.max_steps
        self.tokens = state.num_input_tokens_seen - self._tokens_before
        self.seconds = time.perf_counter() - self._began
        if (now := ledger_of(kwargs["model"])) is not None:
            self.ledger = since(self._ledger_before, now)

    def on_log(self, args: TrainingArguments, state: Any, control: Any, **kwargs: Any) -> None:
        if "loss" in kwargs["logs"]:
            self.losses.append(float(kwargs["logs"]["loss"]))
            self.on_train_end(args, state, control, **kwargs)
            if self._report:
                self._report(self)


class Resumable(Trainer):
    """Saves completed steps when a run ends early; see the module's docstring. A mixin for TRL's trainers. `record`:
    settings that a later run must share to continue from this one. `interrupts`: an entered `Interrupts`, which delays
    signals."""

    def __init__(
        self,
        *,
        output: Path,
        record: Record,
        progress: Progress,
        interrupts: Interrupts,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.remove_callback(PrinterCallback)
        self.add_callback(progress)
        self._output, self._record, self._progress = output, record, progress
        self._interrupts = interrupts

    def run(self, *, resume_from: Path | None) -> tuple[float, float]:
        """Train, and save the adapter in the output folder. Returns the evaluation loss before and after training, in
        nats per token. Raises `CheckpointError`: a file of `resume_from` is damaged, or would run code;
        `BaseException`: the exception that ended the run early, with a note that says what is saved."""
        if resume_from is not None:
            vet_adapter(resume_from)
            if missing := [name for name in _STATES if not (resume_from / name).is_file()]:
                raise CheckpointError(f"{resume_from} has no {missing[0]}; {_ANEW}")  # Trainer does not check it
            with _reading(str(resume_from)):
                done = TrainerState.load_from_json(str(resume_from / TRAINER_STATE_NAME)).global_step
            if resume_from.name != f"checkpoint-{done}":
                raise CheckpointError(f"{resume_from} holds the state after step {done}; {_ANEW}")
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
        """Run forward and backward pass with signals enabled, because these passes change neither adapter nor
        optimizer."""
        with self._interrupts.anywhere():
            return super().training_step(model, inputs, num_items_in_batch)

    def _loss(self) -> float:
        with self._interrupts.anywhere():
            return float(self.evaluate()["eval_loss"])

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """Load the adapter's tensors and nothing else. Trainer would also load a whole model in the folder, and
        adapters in subfolders with their configurations."""
        with _reading(resume_from_checkpoint):
            load_adapter_tensors(self.model, Path(resume_from_checkpoint))

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
                except RuntimeError as error:  # torch.save raises it for a full disk
                    raise OSError(one_line(str(error))) from error
        except BaseException:
            shutil.rmtree(checkpoint, ignore_errors=True)  # free the space of an incomplete checkpoint
            raise

    def _save_rng_state(self, output_dir: str) -> None:
        """Save the random state, and then the adapter in the output folder. Trainer writes the random state just before
        trainer_state.json, which completes a checkpoint. So the adapter is never older than the newest complete
        checkpoint, even after SIGKILL."""
        super()._save_rng_state(output_dir)
        save_adapter(self.model, self._output)

    def create_model_card(self, *_: Any, **__: Any) -> None:
        """Write none: PEFT writes one."""

    def _send_telemetry(self) -> None:
        """Send none. TRL's trainers tell Hugging Face the model's architecture and the machine's device."""

    def _rescue(self) -> str:
        """Write a checkpoint and the adapter if possible. Returns a sentence that says what is saved."""
        done, total = self.state.global_step, self.state.max_steps
        first = ""
        if done:
            try:
                torch.set_rng_state(self._progress.random)
                assert self.model is not None
                self._save_checkpoint(self.model, trial=None)
                save_adapter(self.model, self._output)
                return f"saved: {self._output}, after step {done} of {total}; the same command with --resume continues"
            except StorageError:
                first = "free some disk space, then "
        try:
            last = last_checkpoint(self._output)  # of this run, or of the run to resume
        except ConfigError:
            return f"nothing is saved: {'no checkpoint could be written' if done else 'no step was completed'}"
        return f"saved before: {last}; {first}the same command with --resume continues from it"


class TextTrainer(Resumable, SFTTrainer):
    """TRL's `SFTTrainer`, with the loss of the model itself: TRL multiplies by the weight of the LM head, which may be
    at the providers. Trainer's evaluation averages the means of batches; here each token counts the same."""

    compute_loss = Trainer.compute_loss

    def prediction_step(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **options: Any) -> Any:
        learned = int((inputs["labels"][:, 1:] != NOT_LEARNED).sum())
        found: Any = Trainer.prediction_step(self, model, inputs, *args, **options)
        self._evaluated.append((float(found[0]) * learned, learned))
        return found

    def _loss(self) -> float:
        self._evaluated: list[tuple[float, int]] = []
        super()._loss()
        return sum(loss for loss, _ in self._evaluated) / sum(learned for _, learned in self._evaluated)

    def check_packing(self) -> None:
        """Refuse to pack examples for a model whose output for an example depends on the one before it in its row, as
        with ALiBi, learned positions and states. Raises `ConfigError`."""
        model: Any = self.model
        model.eval()

        def logits(*packed: range) -> Tensor:
            ids, lengths = [token for one in packed for token in one], [len(one) for one in packed]
            batch = self.data_collator([{"input_ids": ids, "seq_lengths": lengths}])
            with torch.no_grad():
                return Tensor(model(**batch).logits[0, len(ids) - lengths[-1] : len(ids)])

        alone, after = logits(range(2, 8)), logits(range(5), range(2, 8))
        if not torch.allclose(alone, after, rtol=0, atol=0.02 * float(alone.abs().max())):
            raise ConfigError("--packing: this model reads the examples before in a row; leave it out")


class PreferenceTrainer(Resumable, DPOTrainer):
    """TRL's `DPOTrainer`. Its data sets hold token ids, as the collator takes them. The reference is the model with its
    adapter turned off."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        compute_all_logits(self)

    def _prepare_dataset(self, dataset: Any, *_: Any) -> Any:
        return dataset


@contextlib.contextmanager
def _reading(checkpoint: str | None) -> Iterator[None]:
    """Context manager: turn errors of reading a checkpoint into `CheckpointError`. Trainer loads a checkpoint's pickles
    with `weights_only=True`, so a pickle that would run code is an error."""
    try:
        yield
    except SymbiosisError:
        raise
    except Exception as error:  # torch and PEFT raise many types for malformed files
        raise CheckpointError(f"{checkpoint} is damaged ({shortened(error)}); {_ANEW}") from error
