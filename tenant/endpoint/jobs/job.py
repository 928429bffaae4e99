"""One fine-tuning job and its events, as they are stored.

FOLDER/job.json       the job; replaced at each change of its state
FOLDER/events.jsonl   its events; appended
FOLDER/adapter/       the output folder of `tenant.training.finetune`: the adapter and its checkpoints
FOLDER/lock           locked by the job's process while it runs
FOLDER/log            what the process wrote to stderr
"""

import contextlib
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

from symbiosis_priv.system.files import UNDECODABLE, write_atomically

Status = Literal["queued", "running", "succeeded", "failed", "cancelled"]
ENDED: tuple[Status, ...] = ("succeeded", "failed", "cancelled")


class JobSettings(msgspec.Struct, frozen=True, kw_only=True):
    """A client's request for a job. The hyperparameters are those of `FineTuning`."""

    training_file: str
    suffix: str | None
    seed: int
    epochs: int
    batch_size: int
    learning_rate: float
    rank: int
    sequence_length: int


class FineTuningJob(msgspec.Struct, kw_only=True):
    """The state of one job.

    Args:
        created_at, finished_at: seconds since 1970.
        fine_tuned_model: name of the resulting adapter; None before.
        trained_tokens: number of tokens, once the job has succeeded.
    """

    id: str
    created_at: int
    model: str
    asked: JobSettings
    status: Status = "queued"
    finished_at: int | None = None
    fine_tuned_model: str | None = None
    trained_tokens: int | None = None
    error: str | None = None


class JobEvent(msgspec.Struct, frozen=True, kw_only=True):
    """An event of a job; with `step`, one step of training and its loss in nats per token."""

    created_at: int
    message: str
    level: Literal["info", "error"] = "info"
    step: int | None = None
    total_steps: int | None = None
    train_loss: float | None = None


@dataclass(eq=False)
class StoredJob:
    """A job and its events, with their folder."""

    folder: Path
    job: FineTuningJob
    events: list[JobEvent]

    @classmethod
    def read(cls, folder: Path) -> "StoredJob | None":
        """Read a job; None if it was never completely written."""
        try:
            job = msgspec.json.decode((folder / "job.json").read_bytes(), type=FineTuningJob)
        except (OSError, *UNDECODABLE):
            return None
        if job.id != folder.name:
            return None
        events, path = [], folder / "events.jsonl"
        for line in path.read_bytes().splitlines() if path.exists() else ():
            with contextlib.suppress(*UNDECODABLE):  # the last line may be incomplete, after a crash
                events.append(msgspec.json.decode(line, type=JobEvent))
        return cls(folder, job, events)

    @property
    def adapter(self) -> Path:
        """The output folder of the run."""
        return self.folder / "adapter"

    def set_status(self, status: Status) -> None:
        """Set the status, and store the job."""
        self.job.status = status
        if status in ENDED:
            self.job.finished_at = int(time.time())
        write_atomically(self.folder / "job.json", msgspec.json.encode(self.job), mode=0o600)

    def add_event(self, event: JobEvent) -> None:
        """Add an event, and store it."""
        self.events.append(event)
        descriptor = os.open(self.folder / "events.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(msgspec.json.encode(event) + b"\n")
