"""The bodies of requests and answers about files and fine-tuning jobs, in OpenAI's formats."""

from typing import Annotated, Generic, Literal, TypeVar

from fastapi import UploadFile
from pydantic import BaseModel, ConfigDict, Field

from tenant.endpoint.api.bodies import INTEGER, Strict
from tenant.endpoint.api.errors import ApiError
from tenant.endpoint.jobs.job import JobEvent, JobSettings, StoredJob
from tenant.endpoint.jobs.uploads import File
from tenant.training.options import FineTuning

_DEFAULTS = FineTuning()


class Upload(BaseModel):
    """`POST /v1/files`."""

    model_config = ConfigDict(extra="forbid")

    file: UploadFile
    purpose: Literal["fine-tune"]


class FileAnswer(BaseModel):
    """A file."""

    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: int
    filename: str
    purpose: Literal["fine-tune"] = "fine-tune"
    status: Literal["processed"] = "processed"

    @classmethod
    def of(cls, file: File) -> "FileAnswer":
        """Describe a file."""
        return cls(id=file.id, bytes=file.bytes, created_at=file.created_at, filename=file.filename)


class Deleted(BaseModel):
    """Confirms that a file or a job was deleted."""

    id: str
    object: Literal["file", "fine_tuning.job"]
    deleted: Literal[True] = True


class Hyperparameters(Strict):
    """How to train; "auto" is the default of `tenant finetune`. `rank` and `sequence_length` are not OpenAI's fields.
    `learning_rate_multiplier`: factor of the default learning rate. `sequence_length`: tokens of an example; longer
    examples are cut."""

    n_epochs: Literal["auto"] | Annotated[int, Field(ge=1, le=1000), INTEGER] | None = None
    batch_size: Literal["auto"] | Annotated[int, Field(ge=1, le=256), INTEGER] | None = None
    learning_rate_multiplier: Literal["auto"] | Annotated[float, Field(gt=0, le=1000)] | None = None
    rank: Annotated[int, Field(ge=1, le=256), INTEGER] | None = None
    sequence_length: Annotated[int, Field(ge=2, le=65536), INTEGER] | None = None


class Supervised(Strict):
    """The options of supervised training."""

    hyperparameters: Hyperparameters | None = None


class Method(Strict):
    """The training method."""

    type: Literal["supervised"]
    supervised: Supervised | None = None


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
        chosen = self.method.supervised.hyperparameters if self.method and self.method.supervised else None
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
        )


class UsedHyperparameters(BaseModel):
    """The hyperparameters of a job."""

    n_epochs: int
    batch_size: int
    learning_rate_multiplier: float
    rank: int
    sequence_length: int


class JobError(BaseModel):
    """Why a job failed."""

    code: str
    message: str
    param: str | None = None


class JobAnswer(BaseModel):
    """A fine-tuning job."""

    id: str
    object: Literal["fine_tuning.job"] = "fine_tuning.job"
    created_at: int
    finished_at: int | None
    model: str
    fine_tuned_model: str | None
    organization_id: str = "tenant"
    status: Literal["queued", "running", "succeeded", "failed", "cancelled"]
    hyperparameters: UsedHyperparameters
    training_file: str
    validation_file: None = None
    result_files: list[str] = Field(default_factory=list)
    trained_tokens: int | None
    seed: int
    error: JobError | None

    @classmethod
    def of(cls, stored: StoredJob) -> "JobAnswer":
        """Describe a job."""
        job, asked = stored.job, stored.job.asked
        return cls(
            id=job.id,
            created_at=job.created_at,
            finished_at=job.finished_at,
            model=job.model,
            fine_tuned_model=job.fine_tuned_model,
            status=job.status,
            hyperparameters=UsedHyperparameters(
                n_epochs=asked.epochs,
                batch_size=asked.batch_size,
                learning_rate_multiplier=asked.learning_rate / _DEFAULTS.learning_rate,
                rank=asked.rank,
                sequence_length=asked.sequence_length,
            ),
            training_file=asked.training_file,
            trained_tokens=job.trained_tokens,
            seed=asked.seed,
            error=None if job.error is None else JobError(code="failed", message=job.error),
        )


class Metrics(BaseModel):
    """One step of training."""

    step: int
    total_steps: int | None
    train_loss: float | None


class EventAnswer(BaseModel):
    """An event of a job."""

    id: str
    object: Literal["fine_tuning.job.event"] = "fine_tuning.job.event"
    created_at: int
    level: Literal["info", "error"]
    message: str
    type: Literal["message", "metrics"]
    data: Metrics | None

    @classmethod
    def of(cls, number: int, event: JobEvent) -> "EventAnswer":
        """Describe event `number`."""
        step = event.step
        return cls(
            id=f"ftevent-{number}",
            created_at=event.created_at,
            level=event.level,
            message=event.message,
            type="message" if step is None else "metrics",
            data=None
            if step is None
            else Metrics(step=step, total_steps=event.total_steps, train_loss=event.train_loss),
        )


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
