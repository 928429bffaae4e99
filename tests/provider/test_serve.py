"""The program as an operator runs it: ready, healthy, no content in logs, and an orderly end."""

import errno
import json
import os
import secrets
import signal
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from typer.testing import CliRunner

from provider import serve as server
from provider.cli import app
from provider.config import provider_toml
from provider.config.schema import ExecutorConfig, to_json
from provider.executor import supervisor
from provider.executor.client import ExecutorRequester
from provider.executor.executor import build
from provider.executor.queues import Envelope, LocalInbox, ProductRequest
from provider.executor.supervisor import ExecutorProcess, ExecutorThread
from provider.gateway.listener import Listener
from provider.serve import Provider
from symbiosis_priv.certificates import revocation
from symbiosis_priv.errors import CheckpointError, ConfigError
from symbiosis_priv.network import wire
from tests.provider.clients import Service, effect, execute, failure
from tests.provider.conftest import Configure, Connect, Keys, Launch
from tests.provider.processes import has_ended
from tests.waiting import until
from tests.warm import Popen

WIDTH = 64
LOG_FIELDS = {
    *("time", "level", "logger", "event", "provider", "address", "groups", "tenant", "reason", "group", "direction"),
    *("rows", "ms", "requests", "clean", "suppressed", "what", "place", "kind", "mib", "progress"),
}


@pytest.fixture(scope="module")
def exposed(keys: Keys, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The provider's key, readable by other users."""
    key = tmp_path_factory.mktemp("exposed") / "exposed.key"
    key.write_bytes(keys.provider.key.read_bytes())
    key.chmod(0o644)
    return key


@pytest.fixture(scope="module")
def service(configure: Configure, launch: Launch, exposed: Path) -> Service:
    return launch(configure(key=exposed))


def test_a_key_that_others_can_read_is_warned_of_in_the_log(service: Service, exposed: Path) -> None:
    (warning,) = (line for line in service.logged() if line["event"] == "key_exposed")
    assert warning["level"] == "warning"
    assert warning["message"].endswith(f"chmod 600 {exposed}")


def test_serve_until_told_to_stop(service: Service, connect: Connect) -> None:
    """The ready file, logs without content, and a clean end on SIGTERM."""
    assert service.ready_file.read_text() == service.address
    assert list(service.ready)[:4] == ["time", "level", "logger", "event"]
    assert (service.ready["level"], service.ready["event"]) == ("info", "listening")
    client, helper = connect(to=service), connect(role="helper", to=service)
    marked = torch.full((3, WIDTH), 0x53454352, dtype=torch.int32)  # the ASCII codes of "SECR"
    request, seed = execute(0, 3), secrets.token_bytes(32)
    client.product(request, marked)
    helper.product(effect(0, 4, seed=seed))
    assert isinstance(client.ask(execute(0, 3), b"TOPSECRET"), wire.Failure)
    client.send_bytes(b"TOPSECRETTOPSECRET")
    assert isinstance(client.receive()[0], wire.Failure)
    client.at_end()

    assert service.stop() == 0
    # kernels are timed and told once in a test session
    lines = [line for line in service.logged() if line["event"] not in ("key_exposed", "message")]
    events = [line["event"] for line in lines]
    assert events[0] == "starting"
    assert next(event for event in events if event != "starting") == "memory_plan"
    assert "started" in events
    assert events[-1] == "stopped"
    assert (lines[-1]["clean"], lines[-1]["requests"]) == (True, 2)
    done = [line for line in lines if line["event"] == "request"]
    served = [(line["tenant"].partition("@sha256:")[0], line["group"], line["rows"]) for line in done]
    assert sorted(served) == [("alice", 0, 3), ("carol", 0, 4)]  # each thread writes its line after its answer
    assert "broken_frame" in [line.get("reason") for line in lines]
    assert {key for line in lines for key in line} <= LOG_FIELDS
    text = service.log_file.read_text().lower()
    for secret in (b"SECR", request.nonce, seed):
        assert secret.hex() not in text
        assert secret.decode("latin-1").lower() not in text
    assert str(0x53454352) not in text


def test_a_killed_executor_process_is_restarted(
    configure: Configure, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After SIGKILL in the middle of a request, the tenant gets BUSY, then the same answer to the same bytes.

    Also if the machine first has no room for another process.
    """
    errors = [MemoryError(), BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")]

    def full_at_first(*args: Any, **kwargs: Any) -> Any:
        if errors:
            raise errors.pop()
        return Popen(*args, **kwargs)

    with Provider(configure(executor=ExecutorConfig(own_process=True, threads=1))) as provider:
        assert isinstance(provider.executor, ExecutorProcess)
        folder = Path(provider.executor.endpoint.removeprefix("ipc://")).parent
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        client = connect(to=provider)
        x = torch.arange(4 * WIDTH, dtype=torch.int32).reshape(4, WIDTH)
        before = client.product(execute(0, 4), x)
        first = provider.executor.pids[0]
        os.kill(first, signal.SIGSTOP)  # the request will be in flight until the executor is killed
        with in_flight(monkeypatch) as forwarded:
            client.send(execute(0, 4), wire.RING32.pack(x))
            assert forwarded.wait(20)
        monkeypatch.setattr(supervisor, "Popen", full_at_first)
        os.kill(first, signal.SIGKILL)
        assert failure(client.receive()[0]) in wire.RETRYABLE
        turned_away = connect("bob", to=provider, role=None).hello(provider.model_digest)
        assert isinstance(turned_away, wire.Failure)  # a tenant that gets a welcome expects answers
        assert turned_away.code == wire.ErrorCode.BUSY
        after, _ = client.until_served(execute(0, 4), x, within=60)
        assert torch.equal(before, after)
        assert provider.executor.pids[0] != first
        assert not errors
        child = provider.executor.pids[0]
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)
    assert not folder.exists()


GATEWAY = """
import os, signal, subprocess, sys
command = [sys.executable, "-m", "provider.processes.executor_process", "0", "."]
child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)
child.stdin.write(sys.stdin.buffer.read())
child.stdout.read(1)  # its first heartbeat
os.kill(child.pid, signal.SIGSTOP)
print(child.pid, flush=True)
signal.pause()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="other systems kill no process with its parent")
def test_a_stopped_executor_process_ends_with_its_gateway(configure: Configure) -> None:
    message = f"{to_json(configure()).decode()}\nsha256:0\nipc://unused\n".encode()
    with subprocess.Popen([sys.executable, "-c", GATEWAY], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as gateway:
        assert gateway.stdin is not None
        assert gateway.stdout is not None
        gateway.stdin.write(message)
        gateway.stdin.close()
        child = int(gateway.stdout.readline())
        try:
            gateway.kill()
            until(lambda: has_ended(child))
        finally:
            if not has_ended(child):
                os.kill(child, signal.SIGKILL)


def test_a_process_that_cannot_be_killed_does_not_hold_up_the_end(
    configure: Configure, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waits for a device or a disk. The gateway must end all the same."""
    handle, ended = ExecutorProcess(configure(), model_digest=""), threading.Event()
    monkeypatch.setattr(handle, "_end", ended.wait)
    handle._watcher = threading.Thread(target=handle._end, daemon=True)
    handle._watcher.start()
    stopping = threading.Thread(target=handle.stop, args=(0.1,), daemon=True)
    stopping.start()
    stopping.join(30)
    stuck = stopping.is_alive()
    ended.set()
    assert not stuck
    handle.close()


@contextmanager
def in_flight(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """An event that is set once the gateway waits for its executor's answer."""
    forwarded, send = threading.Event(), ExecutorRequester.send

    def noted(requester: ExecutorRequester, message: Envelope, *payload: memoryview) -> None:
        send(requester, message, *payload)
        if isinstance(message, ProductRequest):  # and not a report, which the guard asks for
            forwarded.set()

    with monkeypatch.context() as patch:
        patch.setattr(ExecutorRequester, "send", noted)
        yield forwarded


def test_a_folder_that_others_could_replace_is_refused(
    configure: Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Anybody who can write to a folder above the socket's folder can put another executor in its place."""
    tmp_path.chmod(0o777)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(ConfigError, match="other users can change"):
        Provider(configure(executor=ExecutorConfig(own_process=True))).start()


def test_a_provider_that_cannot_start_says_why(configure: Configure, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json"):
        Provider(configure(checkpoint=tmp_path)).start()
    for listen in ("a..b:0", "no.such.host.invalid:0"):
        with pytest.raises(ConfigError, match="listen"):
            Provider(configure(listen=listen)).start()
    for device in ("abacus", "meta"):
        with pytest.raises(ConfigError, match="device"):
            Provider(configure(executor=ExecutorConfig(device=device))).start()


def test_an_executor_serves_only_the_model_that_the_gateway_announced(configure: Configure) -> None:
    """If the checkpoint was replaced, a restarted executor must not serve the new one."""
    with pytest.raises(CheckpointError, match="changed"):
        build(configure(), model_digest="sha256:" + 64 * "0", inbox=LocalInbox())


def test_a_hanging_executor_is_restarted(configure: Configure, connect: Connect) -> None:
    """A hanging executor does not answer. The guard must notice that without a tenant's request."""
    apart = ExecutorConfig(own_process=True, threads=1, hang_timeout_s=1.0)
    x = torch.ones(1, WIDTH, dtype=torch.int32)
    with Provider(configure(executor=apart)) as provider:
        client = connect(to=provider)
        before = client.product(execute(0, 1), x)
        assert isinstance(provider.executor, ExecutorProcess)
        first = provider.executor.pids[0]
        os.kill(first, signal.SIGSTOP)
        until(lambda: provider.executor.hangs)
        after, _ = client.until_served(execute(0, 1), x, within=60)
        assert torch.equal(before, after)
        assert provider.executor.pids[0] != first
        assert provider.status().hangs == 1
    with pytest.raises(ProcessLookupError):
        os.kill(first, 0)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_during_the_start_ends_the_provider(
    configure: Configure, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], number: signal.Signals
) -> None:
    def start(self: Provider) -> None:
        signal.raise_signal(number)
        pytest.fail("it went on")

    before = {n: signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)}
    monkeypatch.setattr(Provider, "start", start)
    monkeypatch.setattr("provider.logs.setup", lambda level: None)
    try:
        server.serve(configure())
    finally:
        for n, handler in before.items():
            signal.signal(n, handler)
    assert not capsys.readouterr().out  # and the provider has not announced that it listens


def test_an_interrupted_start_leaves_no_thread(configure: Configure, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python would end a thread that is in torch's code in a way that makes C++ abort the process."""
    start, before = Listener.start, set(threading.enumerate())

    def interrupted(listener: Listener[Any]) -> None:
        start(listener)
        raise KeyboardInterrupt

    monkeypatch.setattr(Listener, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        Provider(configure()).start()
    assert set(threading.enumerate()) <= before


def test_layers_are_loaded_in_idle_time(configure: Configure, connect: Connect) -> None:
    with Provider(configure()) as provider:
        client = connect(to=provider)

        def loaded() -> int:
            report = client.ask(wire.FetchHealth())
            assert isinstance(report, wire.HealthReport)
            return report.groups_loaded

        until(lambda: loaded() == 9)  # a report may be slightly old


def test_commands(keys: Keys, configure: Configure, provider: Provider, tmp_path: Path) -> None:
    run = CliRunner()
    path = tmp_path / "provider.toml"
    assert run.invoke(app, ["init", str(path)]).exit_code == 0
    assert isinstance(run.invoke(app, ["init", str(path)]).exception, ConfigError)
    assert run.invoke(app, ["init", str(tmp_path / "part.toml"), "--layers", "0-15"]).exit_code == 0
    assert '\nlayers = "0-15"' in (tmp_path / "part.toml").read_text(encoding="utf-8")
    (tmp_path / "other" / "keys").mkdir(parents=True)
    revocation.create_list(tmp_path / "other" / "keys" / "revoked.txt")
    assert run.invoke(app, ["init", str(tmp_path / "other" / "provider.toml")]).exit_code == 0
    revoked = [provider_toml.load(file).tls.revoked for file in (path, tmp_path / "other" / "provider.toml")]
    assert revoked == [None, tmp_path / "other" / "keys" / "revoked.txt"]
    text = path.read_text(encoding="utf-8")
    text = text.replace('"model"', json.dumps(configure().model.checkpoint))
    text = text.replace('# cache = "cache"', f"cache = {json.dumps(str(configure().model.cache))}")
    text = text.replace('"keys/alpha.pem"', json.dumps(str(keys.provider.certificate)))
    path.write_text(text.replace("127.0.0.1:7401", provider.address.replace("127.0.0.1", "0.0.0.0")), encoding="utf-8")
    result = run.invoke(app, ["manifest", "-c", str(path)])
    assert result.stdout.strip() == provider.model_digest, result.output


def test_sighup_ends_no_provider_that_starts(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGHUP)
    try:
        CliRunner().invoke(app, ["serve", "--config", str(tmp_path / "none")])
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_an_executor_that_an_error_has_ended_is_replaced(
    configure: Configure, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the process would live and serve nothing, and nobody would start it again."""

    def fail(now: float) -> NoReturn:
        raise RuntimeError("nobody has thought of it")

    with Provider(configure()) as provider:
        assert isinstance(provider.executor, ExecutorThread)
        client = connect("alice", to=provider)  # idle while the executor is replaced
        monkeypatch.setattr(provider.executor._executor._scheduler, "take", fail)  # no other provider's
        until(lambda: provider.executor.generation == 1 and provider.executor.present)
        assert client.product(execute(0, 40), torch.ones(40, 64, dtype=torch.int32)).any()
