"""The routes of files and fine-tuning jobs."""

import asyncio
from collections.abc import AsyncIterator
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Form, Query, Request, Response
from fastapi.responses import FileResponse
from sse_starlette import EventSourceResponse, ServerSentEvent

from tenant.endpoint.api.bodies import JsonRoute
from tenant.endpoint.api.errors import ApiError
from tenant.endpoint.api.running import while_connected
from tenant.endpoint.api.service import endpoint_of
from tenant.endpoint.jobs import job as formats
from tenant.endpoint.jobs.job import ENDED
from tenant.endpoint.jobs.job_runner import Jobs

UPLOAD = "/v1/files"
"""The path of uploads."""
FORM_BYTES = 16 << 10
"""Bytes of a multipart body besides the file."""
_POLL_S = 0.25
_STREAM: dict[int | str, dict[str, Any]] = {200: {"content": {"text/event-stream": {"schema": {"type": "string"}}}}}
_CONTENT: dict[int | str, dict[str, Any]] = {
    200: {"content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}}
}
Limit = Annotated[int, Query(ge=1, le=100)]
After = Annotated[str | None, Query(max_length=200)]


def jobs_router(jobs: Jobs) -> APIRouter:
    """Return the routes."""
    router = APIRouter(route_class=JsonRoute)
    files = jobs.files
    uploads = APIRouter()

    @uploads.post(UPLOAD)
    def upload(form: Annotated[formats.Upload, Form(media_type="multipart/form-data")]) -> formats.FileAnswer:
        """Store a training file: JSON lines (.jsonl) or plain text."""
        return formats.FileAnswer.model_validate(files.add(form.file.file, form.file.filename or ""))

    @router.get(UPLOAD)
    def list_files(
        purpose: Literal["fine-tune"] | None = None,
        limit: Annotated[int, Query(ge=1, le=10_000)] = 10_000,
        after: After = None,
        order: Literal["asc", "desc"] = "desc",
    ) -> formats.Page[formats.FileAnswer]:
        """List the files."""
        found = files.list() if order == "asc" else files.list()[::-1]
        return formats.Page[formats.FileAnswer].of(
            [formats.FileAnswer.model_validate(file) for file in found], after, limit
        )

    @router.get(UPLOAD + "/{file_id}")
    def file(file_id: str) -> formats.FileAnswer:
        """Describe a file."""
        return formats.FileAnswer.model_validate(files.get(file_id))

    @router.get(UPLOAD + "/{file_id}/content", response_model=None, responses=_CONTENT)
    def content(file_id: str) -> Response:
        """Return the content of a file."""
        return FileResponse(files.path(file_id), media_type="application/octet-stream")

    @router.delete(UPLOAD + "/{file_id}")
    def delete(file_id: str) -> formats.Deleted:
        """Delete a file."""
        jobs.delete_file(file_id)
        return formats.Deleted(id=file_id, object="file")

    @router.post("/v1/fine_tuning/jobs")
    async def create(asked: formats.JobRequest, http: Request) -> formats.JobAnswer:
        """Queue a fine-tuning job of the base model."""
        if asked.model != jobs.name:
            message = f"only the base model, {jobs.name}, can be fine-tuned"
            raise ApiError(404, message, code="model_not_found", param="model")
        client = endpoint_of(http).client(http)
        settings = asked.asked()
        await while_connected(http, jobs.check(asked.training_file, client=client, method=settings.method))
        return formats.JobAnswer.of(jobs.create(settings))

    @router.get("/v1/fine_tuning/jobs")
    def list_jobs(after: After = None, limit: Limit = 20) -> formats.Page[formats.JobAnswer]:
        """List the jobs, the newest first."""
        found = [formats.JobAnswer.of(stored) for stored in jobs.list()[::-1]]
        return formats.Page[formats.JobAnswer].of(found, after, limit)

    @router.get("/v1/fine_tuning/jobs/{job_id}")
    def job(job_id: str) -> formats.JobAnswer:
        """Describe a job."""
        return formats.JobAnswer.of(jobs.get(job_id))

    @router.delete("/v1/fine_tuning/jobs/{job_id}")
    def delete_job(job_id: str, http: Request) -> formats.Deleted:
        """Delete a job that has ended, with its model and its folder. (Not one of OpenAI's routes.)"""
        model = jobs.get(job_id).job.fine_tuned_model
        if model is not None and (users := endpoint_of(http).service.users[model]):
            raise ApiError(409, f"{users} requests use this job's model; wait for their end")
        jobs.delete(job_id)
        return formats.Deleted(id=job_id, object="fine_tuning.job")

    @router.post("/v1/fine_tuning/jobs/{job_id}/cancel")
    def cancel(job_id: str) -> formats.JobAnswer:
        """Cancel a job."""
        return formats.JobAnswer.of(jobs.cancel(job_id))

    @router.get(
        "/v1/fine_tuning/jobs/{job_id}/events", response_model=formats.Page[formats.EventAnswer], responses=_STREAM
    )
    async def events(http: Request, job_id: str, after: After = None, limit: Limit = 20, stream: bool = False) -> Any:
        """List the events of a job, the newest first; or stream them, the oldest first, until the job has ended."""
        stored = jobs.get(job_id)

        async def streamed() -> AsyncIterator[ServerSentEvent]:
            sent = 0
            while True:
                ended = stored.job.status in ENDED  # the last event has been stored
                for number, event in enumerate(stored.events[sent:], start=sent):
                    yield ServerSentEvent(formats.EventAnswer.of(number, event).model_dump_json())
                    sent = number + 1
                if ended:
                    yield ServerSentEvent("[DONE]")
                    return
                await asyncio.sleep(_POLL_S)

        if stream:
            return EventSourceResponse(streamed(), sep="\n")
        found = [formats.EventAnswer.of(number, event) for number, event in enumerate(stored.events)]
        return formats.Page[formats.EventAnswer].of(found[::-1], after, limit)

    router.include_router(uploads)
    return router
