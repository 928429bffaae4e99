"""Runs fine-tuning jobs one after the other, each in its own process.

A job's process may crash or be killed without harm to the endpoint. The state of every job is on disk: a restarted
endpoint starts the queued jobs, and continues the interrupted one from its last checkpoint.
"""

import asyncio
import contextlib
import logging
import os
import secrets
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from symbiosis_priv.errors import ConfigError, SymbiosisError, TaskError
from symbiosis_priv.system.files import UNDECODABLE, lock
from symbiosis_priv.system.processes import command
from tenant.endpoint.api.errors import ApiError, public
from tenant.endpoint.jobs.child import Report, Work
from tenant.endpoint.jobs.job import ENDED, FineTuningJob, JobSettings, StoredJob
from tenant.endpoint.jobs.uploads import Files, private_folder
from tenant.tasks import Tasks

log = logging.getLogger(__name__)

_MAX_WAITING = 100
_MAX_JOBS = 250
_CHECKS = 2  # training files checked at a time
_CHECK_S = 600.0  # 32 MiB of short lines take half a minute
_LINE_BYTES = 1 << 16


class Jobs:
    """The fine-tuning jobs of one endpoint. A context manager. Thread-safe. Raises `ConfigError`: the folder belongs to
    another user, or another endpoint uses it.

    Args:
        folder: private folder of files, jobs and adapters; made if it is missing.
        name: the base model's name for clients.
        remote: arguments of `RemoteConfig` for the processes, as JSON can hold them.
        tasks: the adapters of jobs are registered here, also those of earlier runs.
        end_s: seconds that a process may take to save its steps after SIGTERM; then it is killed.
        start: starts a process, as `subprocess.Popen` does.
    """

    def __init__(
        self,
        folder: Path,
        *,
        model: Path,
        name: str,
        remote: Mapping[str, Any],
        tasks: Tasks,
        end_s: float = 30.0,
        start: Callable[..., "subprocess.Popen[bytes]"] = subprocess.Popen,
    ) -> None:
        self.name = name
        self._model, self._remote, self._tasks = model, remote, tasks
        self._end_s, self._start = end_s, start
        self._folder = private_folder(folder)
        self._lock = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        if not lock(self._lock):
            os.close(self._lock)
            raise ConfigError(f"another endpoint uses {self._folder}; stop it, or name another folder")
        self.files = Files(self._folder / "files")
        runs = private_folder(self._folder / "jobs")
        found = [StoredJob.read(path) for path in runs.iterdir()]
        stored = sorted((one for one in found if one), key=lambda one: (one.job.created_at, one.job.id))
        self._runs = runs
        self._jobs = {one.job.id: one for one in stored}
        self._changed = threading.Condition()
        self._checking = set[str]()  # clients
        self._checks = asyncio.Semaphore(_CHECKS)
        self._process: subprocess.Popen[bytes] | None = None
        self._running: StoredJob | None = None
        self._closing = False
        for one in stored:
            if one.job.status == "running":
                one.set_status("queued")
            elif one.job.status == "succeeded":
                self._register(one)
        self._thread = threading.Thread(target=self._run_all, name="fine-tuning", daemon=True)
        self._thread.start()

    async def check(self, file: str, *, client: str, method: str) -> None:
        """Check a training file for a method in a process, which ends with this call; each client has one at a time.
        Raises `ApiError` if the file is missing or malformed, or the client's last file is still being checked."""
        path = self.files.path(file, param="training_file")
        if client in self._checking:
            raise ApiError(429, "a training file of this key is being checked; try again later", code="overloaded")
        self._checking.add(client)
        try:
            async with self._checks:
                process = await asyncio.create_subprocess_exec(
                    *command("tenant.endpoint.jobs.child", "check", method),
                    stdin=asyncio.subprocess.PIPE,
                    stdout=asyncio.subprocess.PIPE,
                    stderr=asyncio.subprocess.DEVNULL,
                    start_new_session=True,
                )
                try:
                    async with asyncio.timeout(_CHECK_S):
                        said, _ = await process.communicate(os.fsencode(path))
                    wrong = msgspec.json.decode(said, type=Report).error if said else None
                    if process.returncode:
                        wrong = f"{path} cannot be read: the process ended with code {process.returncode}"
                except TimeoutError:
                    wrong = f"{path} takes more than {_CHECK_S:g} s to read; divide it"
                finally:
                    if process.returncode is None:
                        process.kill()
        finally:
            self._checking.remove(client)
        if wrong is not None:
            raise ApiError(400, public(wrong, {path: file}), code="invalid_training_file", param="training_file")

    def create(self, asked: JobSettings) -> StoredJob:
        """Queue a job. Raises `ApiError` if its training file is missing, or there are too many jobs."""
        self.files.get(asked.training_file, param="training_file")
        name = f"ftjob-{secrets.token_hex(12)}"
        job = FineTuningJob(id=name, created_at=int(time.time()), model=self.name, asked=asked)
        with self._changed:
            if sum(one.job.status not in ENDED for one in self._jobs.values()) >= _MAX_WAITING:
                raise ApiError(429, f"{_MAX_WAITING} jobs are waiting; try again later", code="overloaded")
            if len(self._jobs) >= _MAX_JOBS:
                raise ApiError(409, f"there are {_MAX_JOBS} jobs; delete some that have ended", code="too_many")
            stored = StoredJob(private_folder(self._runs / name), job, [])
            stored.set_status("queued")
            stored.add_event("the job is waiting")
            self._jobs[name] = stored
            self._changed.notify_all()
        return stored

    def list(self) -> list[StoredJob]:
        """Return all jobs, the oldest first."""
        with self._changed:
            return list(self._jobs.values())

    def get(self, name: str) -> StoredJob:
        """Return a job. Raises `ApiError` if there is no job with this name."""
        with self._changed:
            if name not in self._jobs:
                raise ApiError(404, f"there is no fine-tuning job {name[:80]!a}", code="not_found")
            return self._jobs[name]

    def cancel(self, name: str) -> StoredJob:
        """Cancel a job; its checkpoints are kept. Raises `ApiError` if there is no such job, or it has ended."""
        stored = self.get(name)
        with self._changed:
            if stored.job.status in ENDED:
                raise ApiError(400, f"the job has {stored.job.status} already", code="ended")
            stored.set_status("cancelled")
            stored.add_event("the job was cancelled")
            if self._running is stored:
                self._stop_process()
        return stored

    def delete(self, name: str) -> None:
        """Delete a job with its model and folder. Raises `ApiError` if there is none, it runs, or its model is used."""
        stored = self.get(name)
        with self._changed:
            if stored.job.status not in ENDED or self._running is stored:
                raise ApiError(409, "the job has not ended; cancel it first, and wait for its end")
            model = stored.job.fine_tuned_model
            if model is not None and model in self._tasks:
                try:
                    self._tasks.unregister(model)
                except TaskError as error:
                    raise ApiError(409, str(error)) from error
            self._jobs.pop(name, None)
            shutil.rmtree(stored.folder, ignore_errors=True)

    def delete_file(self, name: str) -> None:
        """Delete a file. Raises `ApiError` if there is no such file, or a job that has not ended needs it."""
        self.files.get(name)
        with self._changed:
            if any(one.job.asked.training_file == name and one.job.status not in ENDED for one in self._jobs.values()):
                raise ApiError(409, "a fine-tuning job that has not ended needs this file; cancel it first")
            self.files.delete(name)

    def close(self) -> None:
        """Stop. The running job saves its steps, and continues when an endpoint opens this folder again."""
        with self._changed:
            self._closing = True
            self._stop_process()
            self._changed.notify_all()
        self._thread.join()
        os.close(self._lock)

    def __enter__(self) -> "Jobs":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # In the thread of the jobs

    def _run_all(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(
                    lambda: self._closing or any(one.job.status == "queued" for one in self._jobs.values())
                )
                if self._closing:
                    return
                waiting = next(one for one in self._jobs.values() if one.job.status == "queued")
                waiting.set_status("running")
                waiting.add_event("the job has started")
                self._running = waiting
            try:
                self._run(waiting)
            except Exception as error:
                log.exception("fine-tuning job %s", waiting.job.id)
                self._end(waiting, Report(error=f"an error of the endpoint ({type(error).__name__}); see its log"))
            with self._changed:
                self._running = None

    def _run(self, stored: StoredJob) -> None:
        options = msgspec.structs.asdict(stored.job.asked)
        work = Work(
            model=str(self._model),
            data=str(self.files.path(stored.job.asked.training_file)),
            output=str(stored.adapter),
            remote=self._remote,
            options={name: options[name] for name in options if name not in ("training_file", "suffix")},
        )
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        with os.fdopen(os.open(stored.folder / "log", flags, 0o600), "wb") as errors, self._changed:
            if self._closing or stored.job.status != "running":
                return
            process = self._process = self._start(
                command("tenant.endpoint.jobs.child"),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                start_new_session=True,  # Ctrl-C in the terminal reaches only the endpoint
            )
        assert process.stdin is not None
        assert process.stdout is not None
        last = Report()
        # If the process has ended, `flush` raises `BrokenPipeError`, and so does `close`.
        with process.stdout, contextlib.suppress(BrokenPipeError), process.stdin:
            process.stdin.write(msgspec.json.encode(work) + b"\n")
            process.stdin.flush()
            while line := process.stdout.readline(_LINE_BYTES):
                with contextlib.suppress(*UNDECODABLE):
                    last = msgspec.json.decode(line, type=Report)
                    if last.step is not None:
                        loss = "" if last.loss is None else f", loss {last.loss:.4f}"
                        stored.add_event(
                            f"step {last.step} of {last.total_steps}{loss}",
                            step=last.step,
                            total_steps=last.total_steps,
                            train_loss=last.loss,
                        )
        code = process.wait()
        with self._changed:
            self._process = None
        if last.tokens is None and last.error is None:
            last = Report(error=f"the process of the job ended with code {code}; see the file log in {stored.folder}")
        if last.error is not None:
            log.warning("fine-tuning job %s: %s", stored.job.id, last.error)
            paths = {Path(work.data): stored.job.asked.training_file, stored.folder: f"jobs/{stored.job.id}"}
            last = Report(error=public(last.error, {**paths, self._model: self.name}))
        self._end(stored, last)

    def _end(self, stored: StoredJob, last: Report) -> None:
        job = stored.job
        with self._changed:
            if job.status != "running":  # cancelled
                return
            if last.tokens is not None:
                job.trained_tokens = last.tokens
                job.fine_tuned_model = f"ft-{job.asked.suffix or 'model'}-{job.id[-6:]}"
                if self._register(stored):
                    stored.add_event(f"the job has succeeded: model {job.fine_tuned_model}")
                    stored.set_status("succeeded")
                    for checkpoint in stored.adapter.glob("checkpoint-*"):
                        shutil.rmtree(checkpoint, ignore_errors=True)
                    return
                job.fine_tuned_model = None
                last = Report(error="the adapter cannot be used; the log of the endpoint says why")
            if self._closing:  # an endpoint that opens this folder continues the job
                return
            job.error = last.error
            stored.add_event(f"the job has failed: {job.error}", level="error")
            stored.set_status("failed")

    def _register(self, stored: StoredJob) -> bool:
        assert stored.job.fine_tuned_model is not None
        try:
            self._tasks.register(stored.job.fine_tuned_model, stored.adapter)
            return True
        except (SymbiosisError, OSError) as error:
            log.warning("the adapter of fine-tuning job %s cannot be used: %s", stored.job.id, error)
            return False

    def _stop_process(self) -> None:
        """Send SIGTERM, and SIGKILL after a time."""
        process = self._process
        if process is not None:
            process.terminate()
            timer = threading.Timer(self._end_s, process.kill)
            timer.daemon = True
            timer.start()
