"""An endpoint with fine-tuning jobs, and training files."""

import json
import shutil
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

from tenant import RemoteConfig
from tenant.endpoint.api.application import create_app
from tenant.endpoint.api.http_server import Server
from tenant.endpoint.api.service import Service, Settings
from tenant.endpoint.engine.sequential import SequentialEngine
from tenant.endpoint.jobs.job_runner import Jobs
from tenant.endpoint.jobs.router import FORM_BYTES, UPLOAD, jobs_router
from tenant.model.loading import load_language_model, load_tokenizer
from tenant.tasks import Tasks
from tests import warm
from tests.waiting import answering

KEY = "sk-of-the-test-of-jobs"
SECRET = "Grandmother hid the key under the seventh stone"
TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


@pytest.fixture(scope="session")
def chat_model(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny checkpoint, with a chat template."""
    folder = tmp_path_factory.mktemp("chat") / "tiny"
    shutil.copytree(checkpoint, folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture(scope="session")
def chats() -> bytes:
    """Eight chats."""
    turns = [{"role": "user", "content": "Where is the key?"}, {"role": "assistant", "content": SECRET}]
    return b"\n".join(json.dumps({"messages": turns}).encode() for _ in range(8))


@pytest.fixture(scope="session")
def preferences() -> bytes:
    """Eight times two answers, of which the first one is better."""
    asked = {"input": {"messages": [{"role": "user", "content": "Where is the key?"}], "tools": []}}
    answers = {"preferred_output": SECRET, "non_preferred_output": "I do not know."}
    said = {name: [{"role": "assistant", "content": text}] for name, text in answers.items()}
    return b"\n".join(json.dumps(asked | said).encode() for _ in range(8))


@pytest.fixture(scope="session")
def tasks(chat_model: Path) -> Tasks:
    return Tasks(load_language_model(chat_model, remote=RemoteConfig(masking="simulate")), tag="tiny")


OpenJobs = Callable[[Path], Jobs]


@pytest.fixture(scope="session")
def open_jobs(chat_model: Path, tasks: Tasks) -> OpenJobs:
    """`open_jobs(folder)`: the jobs of an endpoint, whose processes are forks of a warm one."""

    def opened(folder: Path) -> Jobs:
        remote = {"masking": "simulate"}
        return Jobs(folder, model=chat_model, name="tiny", remote=remote, tasks=tasks, start=warm.Popen)

    return opened


@pytest.fixture(scope="module")
def jobs(open_jobs: OpenJobs, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Jobs]:
    with open_jobs(tmp_path_factory.mktemp("jobs") / "private") as jobs:
        jobs.files.file_limit = 64 << 10
        yield jobs


@pytest.fixture(scope="module")
def port(jobs: Jobs, tasks: Tasks, chat_model: Path) -> Iterator[int]:
    """The port of an endpoint with `jobs`."""
    tokenizer: Any = load_tokenizer(chat_model)
    engine = SequentialEngine(tasks.model, tokenizer, tasks=tasks)
    service = Service(engine, tasks.model, tokenizer, name="tiny", tasks=tasks)
    settings = Settings(keys=(KEY,), uploads={UPLOAD: jobs.files.file_limit + FORM_BYTES})
    listener = socket.create_server(("127.0.0.1", 0))
    server = Server(create_app(service, settings, routers=[jobs_router(jobs)]), listener, drain_s=5.0)
    with answering(server):
        yield listener.getsockname()[1]
    engine.close()


@pytest.fixture(scope="module")
def client(port: int) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key=KEY, max_retries=0) as client:
        yield client
