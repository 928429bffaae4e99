"""Jobs run in their own processes; a restart continues them, and nothing of the data is seen elsewhere."""

import http.client
import io
import itertools
import json
import os
import shutil
import subprocess
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import openai
import pytest

from symbiosis_priv.errors import ConfigError
from tenant.endpoint.jobs.job import FineTuningJob, JobEvent, JobSettings, StoredJob
from tenant.endpoint.jobs.job_runner import Jobs
from tenant.tasks import Tasks
from tests.tenant.endpoint.jobs.conftest import KEY, SECRET, OpenJobs
from tests.waiting import until

SHORT = {"n_epochs": 1, "batch_size": 4, "sequence_length": 64}


def steps(events: list[JobEvent]) -> list[int]:
    return [event.step for event in events if event.step is not None]


@pytest.mark.parametrize("method", ["supervised", "dpo"])
def test_the_official_client_fine_tunes_a_model(
    method: str, client: Any, port: int, jobs: Jobs, request: Any, caplog: pytest.LogCaptureFixture
) -> None:
    chats = request.getfixturevalue("preferences" if method == "dpo" else "chats")
    more: Any = {"hyperparameters": SHORT}
    if method == "dpo":
        more = {"method": {"type": "dpo", "dpo": {"hyperparameters": {"beta": 0.2, **SHORT}}}}
    file = client.files.create(file=("chats.jsonl", chats), purpose="fine-tune")
    assert client.files.retrieve(file.id) == file
    assert [one.id for one in client.files.list(purpose="fine-tune")] == [file.id]
    assert client.files.content(file.id).read() == chats
    wrong: Any = {"type": "supervised" if method == "dpo" else "dpo"}
    with pytest.raises(openai.BadRequestError, match=f"{file.id}: .* method dpo"):
        client.fine_tuning.jobs.create(model="tiny", training_file=file.id, method=wrong)
    job = client.fine_tuning.jobs.create(model="tiny", training_file=file.id, suffix="key", seed=3, **more)
    with pytest.raises(openai.ConflictError, match="needs this file"):
        client.files.delete(file.id)
    streamed = stream(port, f"/v1/fine_tuning/jobs/{job.id}/events?stream=true")
    job = client.fine_tuning.jobs.retrieve(job.id)
    assert (job.status, job.error, job.seed) == ("succeeded", None, 3), (jobs.get(job.id).folder / "log").read_text()
    assert job.trained_tokens > 0
    assert getattr(job.method, method).hyperparameters.n_epochs == job.hyperparameters.n_epochs == 1
    events = list(client.fine_tuning.jobs.list_events(job.id, limit=2))
    assert [event.id for event in events] == [event["id"] for event in reversed(streamed)]
    assert [event.data["step"] for event in reversed(events) if event.type == "metrics"] == [1, 2]
    assert job.id in [one.id for one in client.fine_tuning.jobs.list()]
    assert job.fine_tuned_model.startswith("ft-key-")
    assert job.fine_tuned_model in [one.id for one in client.models.list()]
    assert client.completions.create(model=job.fine_tuned_model, prompt="Where", max_tokens=2).usage
    assert client.files.delete(file.id).deleted
    with pytest.raises(openai.NotFoundError):
        client.files.retrieve(file.id)
    folder = jobs.get(job.id).folder
    assert not list(folder.glob("adapter/checkpoint-*"))
    written = [path.read_bytes() for path in folder.rglob("*") if path.is_file()]
    assert not any(SECRET.encode() in data for data in written)
    assert SECRET not in caplog.text


def stream(port: int, path: str) -> list[dict[str, Any]]:
    """Read a stream of events to its end."""
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=60)) as connection:
        connection.request("GET", path, headers={"Authorization": f"Bearer {KEY}"})
        lines = connection.getresponse().read().decode().splitlines()
    data = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    assert data.pop() == "[DONE]"
    return [json.loads(one) for one in data]


def long_job(jobs: Jobs, chats: bytes, *, epochs: int) -> Any:
    """Start a job, and wait for its second step."""
    file = jobs.files.add(io.BytesIO(chats), "chats.jsonl")
    asked: Any = {"training_file": file.id, "suffix": None, "seed": 0, "rank": 2, "sequence_length": 64}
    stored = jobs.create(JobSettings(**asked, epochs=epochs, batch_size=4, learning_rate=1e-3))
    until(lambda: len(steps(stored.events)) >= 2 or stored.job.error is not None)
    assert stored.job.error is None
    return stored


def test_a_cancelled_job_ends_and_the_next_one_runs(client: Any, jobs: Jobs, chats: bytes) -> None:
    stored = long_job(jobs, chats, epochs=1000)
    process = jobs._process
    assert process is not None
    assert client.fine_tuning.jobs.cancel(stored.job.id).status == "cancelled"
    with pytest.raises(openai.BadRequestError, match="cancelled already"):
        client.fine_tuning.jobs.cancel(stored.job.id)
    until(lambda: process.poll() is not None)
    assert stored.job.status == "cancelled"
    assert stored.job.fine_tuned_model is None
    until(lambda: jobs._running is None)


def test_a_job_goes_on_when_the_endpoint_starts_again(open_jobs: OpenJobs, chats: bytes, tmp_path: Path) -> None:
    """From the last step after `close` and when the endpoint has died; else from the last checkpoint."""
    folder = tmp_path / "private"
    with open_jobs(folder) as jobs:
        stored = long_job(jobs, chats, epochs=1000)
        with pytest.raises(ConfigError, match="another endpoint"):
            open_jobs(folder)
    for last, end in itertools.pairwise(("closed", "died", "killed", "closed")):
        assert stored.job.status == "running"
        before = steps(stored.events)
        with open_jobs(folder) as jobs:
            stored = jobs.get(stored.job.id)
            until(partial(has_more_steps, stored, len(before)))
            assert stored.job.error is None
            assert steps(stored.events)[: len(before)] == before
            first = steps(stored.events)[len(before)]
            assert first in range(2 if last == "killed" else before[-1] + 1, before[-1] + 3)
            process = jobs._process
            assert process is not None
            assert process.stdin is not None
            if end != "closed":
                jobs._closing = True  # the endpoint has died, and writes nothing more
                process.stdin.close() if end == "died" else process.kill()
                process.wait(60)


def has_more_steps(stored: StoredJob, count: int) -> bool:
    return len(steps(stored.events)) > count or stored.job.error is not None


def test_a_finished_jobs_model_is_there_when_the_endpoint_starts_again(
    open_jobs: OpenJobs, tasks: Tasks, adapters: Path, tmp_path: Path
) -> None:
    asked = JobSettings(
        training_file="file-1", suffix=None, seed=0, epochs=1, batch_size=1, learning_rate=1, rank=1, sequence_length=9
    )
    for name in ("ftjob-good", "ftjob-damaged"):
        folder = tmp_path / "private" / "jobs" / name
        folder.mkdir(parents=True)
        job = FineTuningJob(
            id=name, created_at=1, model="tiny", asked=asked, fine_tuned_model=name.replace("ftjob", "ft")
        )
        StoredJob(folder, job, []).set_status("succeeded")
    shutil.copytree(adapters / "lora", tmp_path / "private" / "jobs" / "ftjob-good" / "adapter")
    with open_jobs(tmp_path / "private"):
        assert "ft-good" in tasks
        assert "ft-damaged" not in tasks
        tasks.unregister("ft-good")


def test_a_job_that_cannot_run_says_why(client: Any, jobs: Jobs) -> None:
    pairs = b'{"prompt": "a", "completion": "b"}'
    file = client.files.create(file=("pairs.jsonl", pairs), purpose="fine-tune")
    job = client.fine_tuning.jobs.create(
        model="tiny", training_file=file.id, hyperparameters={"sequence_length": 65536}
    )
    until(lambda: jobs.get(job.id).job.status == "failed")
    assert "context" in client.fine_tuning.jobs.retrieve(job.id).error.message


def test_errors_name_no_paths_of_this_machine(client: Any, jobs: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
    chats = b'{"messages": [{"role": "user", "content": "x"}]}'  # no message to learn
    file = client.files.create(file=("chats.jsonl", chats), purpose="fine-tune")
    refused = client.fine_tuning.jobs.create(model="tiny", training_file=file.id)
    until(lambda: jobs.get(refused.id).job.status == "failed")
    said = client.fine_tuning.jobs.retrieve(refused.id).error.message
    assert said.startswith(f"{file.id}, line 1")
    monkeypatch.setattr(jobs, "_start", _ended)
    crashed = client.fine_tuning.jobs.create(model="tiny", training_file=file.id)
    until(lambda: jobs.get(crashed.id).job.status == "failed")
    said += client.fine_tuning.jobs.retrieve(crashed.id).error.message
    said += str(client.fine_tuning.jobs.list_events(crashed.id).data)
    assert f"jobs/{crashed.id}" in said
    assert str(jobs._folder.parent) not in said


def _ended(_: list[str], **options: Any) -> subprocess.Popen[bytes]:
    """A process that has ended with status 1 before its work is written to it."""
    process = subprocess.Popen(["false"], **options)
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    return process
