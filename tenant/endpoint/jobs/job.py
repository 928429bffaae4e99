"""One fine-tuning job and its events, as they are stored; and the bodies of requests and answers about files and jobs,
in OpenAI's formats.

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
from typing import Annotated, Any, Generic, Literal, TypeVar

import msgspec
from fastapi import UploadFile
from pydantic import BaseModel, ConfigDict, Field

from symbiosis_priv.system.files import UNDECODABLE, write_atomically
from tenant.endpoint.api.bodies import INTEGER, Strict
from tenant.endpoint.api.errors import ApiError
from tenant.training.options import DEFAULT_BETA, FineTuning

_DEFAULTS = FineTuning()
Status = Literal["queued", "running", "succeeded", "failed", "cancelled"]
ENDED: tuple[Status, ...] = ("succeeded", "failed", "cancelled")


class JobSettings(msgspec.Struct, frozen=True, kw_only=True):
    """A client's request for a job. The hyperparameters are those of `FineTuning`; `beta` is of the method dpo."""

    training_file: str
    suffix: str | None
    seed: int
    epochs: int
    batch_size: int
    learning_rate: float
    rank: int
    sequence_length: int
    beta: float | None = None

    @property
    def method(self) -> Literal["supervised", "dpo"]:
        return "supervised" if self.beta is None else "dpo"


class FineTuningJob(msgspec.Struct, kw_only=True):
    """The state of one job. Times are seconds since 1970. `fine_tuned_model`: the resulting adapter; None before."""

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
        self.job.status = status
        if status in ENDED:
            self.job.finished_at = int(time.time())
        write_atomically(self.folder / "job.json", msgspec.json.encode(self.job), mode=0o600)

    def add_event(self, message: str, **more: Any) -> None:
        """Add an event with further fields of `JobEvent`, and store it."""
        event = JobEvent(created_at=int(time.time()), message=message, **more)
        self.events.append(event)
        descriptor = os.open(self.folder / "events.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(msgspec.json.encode(event) + b"\n")


class Upload(BaseModel):
    """`POST /v1/files`."""

    model_config = ConfigDict(extra="forbid")

    file: UploadFile
    purpose: Literal["fine-tune"]


class FileAnswer(BaseModel):
    model_config = ConfigDict(from_attributes=True)  # of `File`

    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: int
    filename: str
    purpose: Literal["fine-tune"] = "fine-tune"
    status: Literal["processed"] = "processed"


class Deleted(BaseModel):
    """Confirms that a file or a job was deleted."""

    id: str
    object: Literal["file", "fine_tuning.job"]
    deleted: Literal[True] = True


class Hyperparameters(Strict):
    """How to train; "auto" is the default of `tenant finetune`. OpenAI has no `rank`, and no `sequence_length`: tokens
    of an example; longer examples are cut."""

    n_epochs: Literal["auto"] | Annotated[int, Field(ge=1, le=1000), INTEGER] | None = None
    batch_size: Literal["auto"] | Annotated[int, Field(ge=1, le=256), INTEGER] | None = None
    learning_rate_multiplier: Literal["auto"] | Annotated[float, Field(gt=0, le=1000)] | None = None
    rank: Annotated[int, Field(ge=1, le=256), INTEGER] | None = None
    sequence_length: Annotated[int, Field(ge=2, le=65536), INTEGER] | None = None


class DpoHyperparameters(Hyperparameters):
    """`beta`: the larger, the closer the model stays to the base model."""

    beta: Literal["auto"] | Annotated[float, Field(gt=0, le=2)] | None = None


class Supervised(Strict):
    hyperparameters: Hyperparameters | None = None


class Dpo(Strict):
    hyperparameters: DpoHyperparameters | None = None


class Method(Strict):
    type: Literal["supervised", "dpo"]
    supervised: Supervised | None = None
    dpo: Dpo | None = None


class JobRequest(Strict):
    """`POST /v1/fine_tuning/jobs`."""

    model: Annotated[str, Field(max_length=1024)]
    training_file: Annotated[str, Field(max_length=1024)]
    hyperparameters: Hyperparameters | None = None
    integrations: None = None
    metadata: None = None
    method: Method | None = None
    seed: Annotated[int, Field(ge=0, lt=2**32), INTEGER] | None = None
    suffix: Annotated[str, Field(pattern="^[A-Za-z0-9._-]{1,40}$")] | None = None
    validation_file: None = None

    def asked(self) -> JobSettings:
        """Return the job with a number for each "auto"."""
        kind = self.method.type if self.method else "supervised"
        of_method = getattr(self.method, kind, None)
        chosen = of_method.hyperparameters if of_method else None
        given = {
            name: value
            for name, value in (chosen or self.hyperparameters or Hyperparameters()).model_dump().items()
            if value not in ("auto", None)
        }
        return JobSettings(
            training_file=self.training_file,
            suffix=self.suffix,
            seed=self.seed or 0,
            epochs=given.get("n_epochs", int(_DEFAULTS.epochs)),
            batch_size=given.get("batch_size", _DEFAULTS.batch_size),
            learning_rate=_DEFAULTS.learning_rate * given.get("learning_rate_multiplier", 1.0),
            rank=given.get("rank", _DEFAULTS.rank),
            sequence_length=given.get("sequence_length", _DEFAULTS.sequence_length),
            beta=given.get("beta", DEFAULT_BETA) if kind == "dpo" else None,
        )


class UsedHyperparameters(BaseModel):
    n_epochs: int
    batch_size: int
    learning_rate_multiplier: float
    rank: int
    sequence_length: int
    beta: float | None = None


class JobError(BaseModel):
    code: str
    message: str
    param: str | None = None


class JobAnswer(BaseModel):
    id: str
    object: Literal["fine_tuning.job"] = "fine_tuning.job"
    created_at: int
    finished_at: int | None
    model: str
    fine_tuned_model: str | None
    organization_id: str = "tenant"
    status: Literal["queued", "running", "succeeded", "failed", "cancelled"]
    hyperparameters: UsedHyperparameters
    method: dict[str, Any]
    training_file: str
    validation_file: None = None
    result_files: list[str] = Field(default_factory=list)
    trained_tokens: int | None
    seed: int
    error: JobError | None

    @classmethod
    def of(cls, stored: StoredJob) -> "JobAnswer":
        job, asked = stored.job, stored.job.asked
        given = msgspec.structs.asdict(asked) | msgspec.structs.asdict(job)
        used = UsedHyperparameters(
            **given, n_epochs=asked.epochs, learning_rate_multiplier=asked.learning_rate / _DEFAULTS.learning_rate
        )
        error = None if job.error is None else JobError(code="failed", message=job.error)
        method = {"type": asked.method, asked.method: {"hyperparameters": used.model_dump(exclude_none=True)}}
        return cls(**given | {"hyperparameters": used, "method": method, "error": error})


class Metrics(BaseModel):
    step: int
    total_steps: int | None
    train_loss: float | None


class EventAnswer(BaseModel):
    id: str
    object: Literal["fine_tuning.job.event"] = "fine_tuning.job.event"
    created_at: int
    level: Literal["info", "error"]
    message: str
    type: Literal["message", "metrics"]
    data: Metrics | None

    @classmethod
    def of(cls, number: int, event: JobEvent) -> "EventAnswer":
        given = msgspec.structs.asdict(event)
        metrics = None if event.step is None else Metrics(**given)
        return cls(**given, id=f"ftevent-{number}", type="metrics" if metrics else "message", data=metrics)


Listed = TypeVar("Listed", FileAnswer, JobAnswer, EventAnswer)


class Page(BaseModel, Generic[Listed]):
    """A part of a list."""

    object: Literal["list"] = "list"
    data: list[Listed]
    has_more: bool

    @classmethod
    def of(cls, found: list[Listed], after: str | None, limit: int) -> "Page[Listed]":
        """Return at most `limit` entries that follow the entry `after`. Raises `ApiError` if there is no such entry."""
        if after is not None:
            names = [one.id for one in found]
            if after not in names:
                raise ApiError(404, "after is not in this list", code="not_found", param="after")
            found = found[names.index(after) + 1 :]
        return cls(data=found[:limit], has_more=len(found) > limit)
