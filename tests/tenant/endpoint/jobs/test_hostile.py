"""Hostile names, sizes and paths: a clear error, nothing outside the folder, and no memory taken first."""

import asyncio
import contextlib
import http.client
import io
import json
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from symbiosis_priv.errors import ConfigError
from tenant.endpoint.api.errors import ApiError
from tenant.endpoint.jobs.job_runner import Jobs
from tenant.endpoint.jobs.uploads import Files
from tests.tenant.endpoint.jobs.conftest import KEY, SECRET
from tests.waiting import until

LINE = json.dumps({"text": SECRET}).encode()


def ask(port: int, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, dict[str, Any]]:
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=30)) as connection:
        connection.request(method, path, body, {"Authorization": f"Bearer {KEY}", **headers})
        answer = connection.getresponse()
        data = answer.read()
    return answer.status, json.loads(data)["error"] if answer.status >= 400 else json.loads(data)


def form(*parts: tuple[str, bytes]) -> tuple[bytes, dict[str, str]]:
    """A multipart body of (the rest of the disposition, content)."""
    whole = b"".join(
        b"--B\r\nContent-Disposition: form-data; " + name.encode() + b"\r\n\r\n" + content + b"\r\n"
        for name, content in parts
    )
    return whole + b"--B--\r\n", {"Content-Type": "multipart/form-data; boundary=B"}


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("../../../etc/passwd", "passwd"),
        ("/etc/cron.d/job.jsonl", "job.jsonl"),
        ("..", ".."),
        ("a\u202etxt.jsonl", "atxt.jsonl"),
        ("C:\\notes\\x.jsonl", "x.jsonl"),
        ("n" * 4000, "n" * 255),
    ],
)
def test_a_file_name_is_only_shown(client: Any, jobs: Jobs, name: str, shown: str) -> None:
    file = client.files.create(file=(name, LINE), purpose="fine-tune")
    assert file.filename == shown
    path = jobs.files.path(file.id)
    assert path.parent == jobs.files._folder
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == stat.S_IMODE(path.parents[1].stat().st_mode) == 0o700
    client.files.delete(file.id)
    assert not list(path.parent.glob(f"{file.id}*"))


@pytest.mark.parametrize("name", ["..%2f..%2fjobs", "file-1", "%00", ".", "file-%2e%2e%2f", "file-" + "0" * 500])
def test_other_names_are_no_files_and_no_jobs(port: int, name: str) -> None:
    for path in (f"/v1/files/{name}", f"/v1/files/{name}/content", f"/v1/fine_tuning/jobs/{name}"):
        assert ask(port, "GET", path)[0] == 404


def test_a_file_that_is_too_large_is_refused_and_leaves_nothing(client: Any, port: int, jobs: Jobs) -> None:
    before = set(jobs.files._folder.iterdir())
    with pytest.raises(openai.APIStatusError) as raised:
        client.files.create(file=("x.jsonl", bytes(jobs.files.file_limit + 1)), purpose="fine-tune")
    assert raised.value.status_code == 413
    body, headers = form(('name="file"; filename="x"', bytes(100)), ('name="purpose"', b"fine-tune"))
    sent = 0

    def endless() -> Iterator[bytes]:
        nonlocal sent
        yield body[:90]
        while True:  # no length is announced
            sent += 1
            yield bytes(1 << 14)

    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the endpoint may have closed the connection
        assert ask(port, "POST", "/v1/files", endless(), **headers)[0] == 413
    assert sent < 4096
    assert set(jobs.files._folder.iterdir()) == before


def test_few_files_are_uploaded_at_a_time(port: int) -> None:
    """Each may take its whole size in the folder for temporary files."""
    body, headers = form(('name="file"; filename="x"', bytes(100)), ('name="purpose"', b"fine-tune"))
    head = [f"POST /v1/files HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {KEY}\r\nContent-Length: {len(body)}"]
    head += [f"{name}: {value}" for name, value in headers.items()]
    with contextlib.ExitStack() as stack:
        for _ in range(2):  # as many as stay free for other keys
            upload = stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=30))
            upload.sendall("\r\n".join([*head, "", ""]).encode() + body[:60])
        until(lambda: ask(port, "POST", "/v1/files", body, **headers)[0] == 429)
    until(lambda: ask(port, "POST", "/v1/files", body, **headers)[0] == 200)
    (stored,) = ask(port, "GET", "/v1/files?limit=1")[1]["data"]
    assert ask(port, "DELETE", f"/v1/files/{stored['id']}")[0] == 200


def test_all_files_together_have_limits(tmp_path: Path) -> None:
    many = Files(tmp_path / "many", count=2)
    with pytest.raises(ApiError, match="empty"):
        many.add(io.BytesIO(), "a")
    for _ in range(2):
        many.add(io.BytesIO(b"x"), "a")
    with pytest.raises(ApiError, match="delete some"):
        many.add(io.BytesIO(b"x"), "a")
    files = Files(tmp_path / "files", limit=10)
    files.add(io.BytesIO(bytes(8)), "a")
    with pytest.raises(Exception, match="delete some"):
        files.add(io.BytesIO(bytes(8)), "b")
    assert len(list((tmp_path / "files").iterdir())) == 2
    (tmp_path / "files" / "file-half.jsonl").write_bytes(b"x")
    assert len(Files(tmp_path / "files").list()) == 1
    assert len(list((tmp_path / "files").iterdir())) == 2


@pytest.mark.parametrize(
    ("parts", "named"),
    [
        ([('name="file"; filename="x"', LINE)], "purpose"),
        ([('name="purpose"', b"fine-tune")], "file"),
        ([('name="file"; filename="x"', LINE), ('name="purpose"', b"batch")], "purpose"),
        ([('name="file"; filename="x"', LINE), ('name="purpose"', b"fine-tune"), ('name="more"', b"1")], "more"),
        ([('name="file"', LINE), ('name="purpose"', b"fine-tune")], "file"),
    ],
)
def test_a_wrong_form_is_an_error_that_names_the_field(port: int, parts: Any, named: str) -> None:
    body, headers = form(*parts)
    status, error = ask(port, "POST", "/v1/files", body, **headers)
    assert (status, error["param"]) == (400, named)
    assert SECRET not in str(error)


@pytest.mark.parametrize("body", [b"", b"--B\r\n", b"--B\r\nContent-Disposition: form-data\r\n\r\nx\r\n--B--\r\n"])
def test_a_broken_form_is_an_error(port: int, body: bytes) -> None:
    assert ask(port, "POST", "/v1/files", body, **{"Content-Type": "multipart/form-data; boundary=B"})[0] == 400


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model": "lora"}, "model"),
        ({"training_file": "file-none"}, "training_file"),
        ({"validation_file": "file-1"}, "validation_file"),
        ({"suffix": "../up"}, "suffix"),
        ({"hyperparameters": {"n_epochs": 0}}, "hyperparameters"),
        ({"hyperparameters": {"beta": 1}}, "hyperparameters.beta"),
        ({"method": {"type": "reinforcement", "reinforcement": {"grader": {}}}}, "method.type"),
        ({"method": {"type": "dpo", "dpo": {"hyperparameters": {"beta": 0}}}}, "method.dpo.hyperparameters.beta"),
        ({"integrations": [{"type": "wandb"}]}, "integrations"),
        ({"seed": -1}, "seed"),
    ],
)
def test_what_a_job_does_not_support_is_an_error_that_names_the_field(
    port: int, jobs: Jobs, change: dict[str, Any], named: str
) -> None:
    asked = json.dumps({"model": "tiny", "training_file": "file-1", **change})
    status, error = ask(port, "POST", "/v1/fine_tuning/jobs", asked, **{"Content-Type": "application/json"})
    assert status in (400, 404)
    assert error["param"].startswith(named)


def test_a_wrong_method_gets_all_methods_of_the_path(port: int) -> None:
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=30)) as connection:
        connection.request("PUT", "/v1/fine_tuning/jobs", headers={"Authorization": f"Bearer {KEY}"})
        answer = connection.getresponse()
        assert (answer.status, answer.headers["Allow"]) == (405, "GET, POST")
        answer.read()


def test_a_malformed_line_is_named_and_not_repeated(client: Any, jobs: Jobs) -> None:
    file = client.files.create(file=("x.jsonl", LINE + b'\n{"text": "' + SECRET.encode()), purpose="fine-tune")
    with pytest.raises(openai.BadRequestError, match=f"{file.id}, line 2") as raised:
        client.fine_tuning.jobs.create(model="tiny", training_file=file.id)
    assert SECRET not in str(raised.value)
    assert str(jobs.files._folder) not in str(raised.value)
    client.files.delete(file.id)


def test_a_key_checks_one_training_file_at_a_time_in_a_process_that_ends_with_its_request(
    client: Any, port: int, jobs: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = client.files.create(file=("x.jsonl", LINE), purpose="fine-tune")
    asked = json.dumps({"model": "tiny", "training_file": file.id}).encode()
    head = f"POST /v1/fine_tuning/jobs HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {KEY}\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(asked)}\r\n\r\n"
    started: list[Any] = []
    begin = asyncio.create_subprocess_exec

    async def endless(*_: str, **options: Any) -> Any:
        started.append(await begin("sleep", "1000", **options))
        return started[-1]

    monkeypatch.setattr(asyncio, "create_subprocess_exec", endless)
    before = len(jobs.list())
    with socket.create_connection(("127.0.0.1", port), timeout=30) as first:
        first.sendall(head.encode() + asked)
        until(lambda: started)
        status, error = ask(port, "POST", "/v1/fine_tuning/jobs", asked, **{"Content-Type": "application/json"})
        assert (status, error["code"]) == (429, "overloaded")
        assert ask(port, "GET", "/v1/fine_tuning/jobs")[0] == 200
    until(lambda: started[0].returncode is not None)
    until(lambda: not jobs._checking)
    assert len(started) == 1
    assert len(jobs.list()) == before
    client.files.delete(file.id)


def test_jobs_are_limited_and_can_be_deleted(
    client: Any, port: int, jobs: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = client.files.create(file=("x.jsonl", (LINE + b"\n") * 100), purpose="fine-tune")
    job = client.fine_tuning.jobs.create(model="tiny", training_file=file.id, hyperparameters={"n_epochs": 1000})
    path = f"/v1/fine_tuning/jobs/{job.id}"
    assert ask(port, "DELETE", path)[0] == 409
    monkeypatch.setattr("tenant.endpoint.jobs.job_runner._MAX_JOBS", len(jobs.list()))
    with pytest.raises(openai.ConflictError, match="delete some"):
        client.fine_tuning.jobs.create(model="tiny", training_file=file.id)
    folder = jobs.cancel(job.id).folder
    until(lambda: ask(port, "DELETE", path)[0] == 200)
    assert ask(port, "GET", path)[0] == 404
    assert not folder.exists()
    client.files.delete(file.id)


def test_a_folder_that_others_can_change_is_refused(tmp_path: Path) -> None:
    parent = tmp_path / "open"
    parent.mkdir()
    parent.chmod(0o777)
    with pytest.raises(ConfigError, match="other users"):
        Files(parent / "files")


@pytest.mark.skipif(sys.platform != "linux", reason="the file is Linux's")
def test_a_job_that_takes_all_memory_is_killed_before_the_endpoint() -> None:
    score = "print(open('/proc/self/oom_score_adj').read())"
    code = f"from tenant.endpoint.jobs import child; child._lower_priority(); {score}"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout.strip() == b"1000"
