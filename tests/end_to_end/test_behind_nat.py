"""`examples/deploy/behind-nat`: an executor and a helper without a public address, behind sshd and HAProxy.

Three network namespaces stand for three networks. No packet is forwarded between the tenant's and the providers'
network, so the only way leads through the public host. The files of the example run as they are, apart from the user,
keys and host names.
"""

import contextlib
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from provider.cli import app
from symbiosis_priv.certificates.issuing import create_authority, issue
from symbiosis_priv.certificates.reading import Kind
from symbiosis_priv.checkpoints.weights import WeightStore
from symbiosis_priv.federation import federation_text
from tests import warm
from tests.waiting import until

NAT = Path(__file__).parents[2] / "examples/deploy/behind-nat"
PUBLIC, TENANT, HOME = "10.77.1.1", "10.77.1.2", "10.77.2.2"
PROVIDERS = {"alpha": ("executor", 7411), "beta": ("helper", 7412)}  # role, and the port of the tunnel

INSIDE = """
import ctypes, os, runpy, sys
namespace, hosts, *words = sys.argv[1:]
libc = ctypes.CDLL(None, use_errno=True)
with open(f"/run/netns/{namespace}") as file:
    assert libc.setns(file.fileno(), 0x40000000) == 0  # CLONE_NEWNET
assert libc.unshare(0x00020000) == 0  # CLONE_NEWNS
assert libc.mount(b"none", b"/", None, 0x44000, None) == 0  # MS_REC | MS_PRIVATE
assert libc.mount(hosts.encode(), b"/etc/hosts", None, 0x1000, None) == 0  # MS_BIND
sys.argv = words[1:]
if words[0] == "-m":
    runpy.run_module(words[1], run_name="__main__", alter_sys=True)
else:
    sys.argv = words
    runpy.run_path(words[0], run_name="__main__")
"""


def unable() -> str | None:
    """Why this machine cannot run the tests."""
    for tool in ("ip", "sshd", "ssh-keygen", "haproxy"):
        if shutil.which(tool, path=PATH) is None:
            return f"no {tool}"
    may = subprocess.run(["unshare", "--net", "--mount", "true"], capture_output=True, check=False).returncode == 0
    return None if may and os.geteuid() == 0 else "only root may make network namespaces here"


PATH = os.environ["PATH"] + ":/usr/sbin:/sbin"
WHY_NOT = unable()
pytestmark = pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))


class Networks:
    """The namespaces of a tenant, of a public host and of the providers, and what runs in them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._names = {place: f"nat-{os.getpid()}-{place}" for place in ("tenant", "public", "home")}
        self._running: list[subprocess.Popen[bytes] | warm.Popen] = []
        (folder / "inside.py").write_text(INSIDE)
        (folder / "hosts").write_text(f"127.0.0.1 localhost\n{PUBLIC} alpha.example beta.example\n")
        for name in self._names.values():
            self._ip(f"netns add {name}")
            self._ip(f"-n {name} link set lo up")
        for place, near, far in (("tenant", PUBLIC, TENANT), ("home", "10.77.2.1", HOME)):
            ours, theirs = self._names["public"], self._names[place]
            self._ip(f"-n {ours} link add {place} type veth peer name eth0 netns {theirs}")
            for name, device, address in ((ours, place, near), (theirs, "eth0", far)):
                self._ip(f"-n {name} addr add {address}/24 dev {device}")
                self._ip(f"-n {name} link set {device} up")

    def _ip(self, words: str) -> None:
        subprocess.run(["ip", *words.split()], check=True)

    def run(self, place: str, *command: str) -> subprocess.Popen[bytes]:
        """Start a command in a namespace; its output goes to `log`."""
        with (self.folder / "log").open("ab") as log:
            words = ["ip", "netns", "exec", self._names[place], *command]
            process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
        self._running.append(process)
        return process

    def python(self, place: str, *words: str, **options: Any) -> warm.Popen:
        """Start a Python module or script in a namespace, which resolves the providers' names to the public host."""
        where = [str(self.folder / "inside.py"), self._names[place], str(self.folder / "hosts")]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "SYMBIOSIS_PRIV_CACHE": str(self.folder / "cache")}
        with (self.folder / "log").open("ab") as log:
            process = warm.Popen([sys.executable, *where, *words], env=environment, stderr=log, **options)
        self._running.append(process)
        return process

    def connects(self, place: str, host: str, port: int) -> bool:
        """Returns True if a TCP connection from `place` succeeds."""
        script = f"import socket; socket.create_connection(({host!r}, {port}), timeout=2)"
        words = ["ip", "netns", "exec", self._names[place], sys.executable, "-S", "-c", script]
        return subprocess.run(words, capture_output=True, check=False).returncode == 0

    def close(self) -> None:
        for process in self._running:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            process.wait(30)
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    with contextlib.suppress(BrokenPipeError):
                        pipe.close()
        for name in self._names.values():
            self._ip(f"netns delete {name}")


@pytest.fixture
def networks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Networks]:
    monkeypatch.setenv("PATH", PATH)
    networks = Networks(tmp_path)
    try:
        yield networks
    finally:
        networks.close()


def public_host(networks: Networks) -> None:
    """Start sshd with the example's configuration and keys; the account is root, because the test makes no users."""
    folder = networks.folder
    for name in ("host", "alpha", "beta"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)], check=True)
    allowed = (NAT / "authorized_keys").read_text()
    for name in PROVIDERS:
        public = (folder / f"{name}.pub").read_text().split()[1]
        allowed = allowed.replace(f"PUBLIC-KEY-OF-{name.upper()}", public)
    (folder / "authorized_keys").write_text(allowed)
    settings = (NAT / "sshd_config").read_text().replace("Match User tunnel", "Match User root")
    head = ["Port 2222", f"HostKey {folder}/host", f"AuthorizedKeysFile {folder}/authorized_keys", "StrictModes no"]
    head += ["PidFile none", "PermitRootLogin forced-commands-only"]
    (folder / "sshd_config").write_text("\n".join([*head, settings]))
    Path("/run/sshd").mkdir(exist_ok=True)
    networks.run("public", str(shutil.which("sshd")), "-D", "-e", "-f", str(folder / "sshd_config"))
    (folder / "known_hosts").write_text("[10.77.2.1]:2222 " + " ".join((folder / "host.pub").read_text().split()[:2]))
    until(lambda: networks.connects("home", "10.77.2.1", 2222))


def tunnel(networks: Networks, name: str, port: int, *, to: str) -> subprocess.Popen[bytes]:
    """Run the command of symbiosis-tunnel.service."""
    unit = (NAT / "symbiosis-tunnel.service").read_text().replace("\\\n", " ")
    command = re.findall(r"^ExecStart=(.*)$", unit, re.MULTILINE)[0]
    for before, after in {
        "/etc/symbiosis-provider/tunnel.key": str(networks.folder / name),
        "/etc/symbiosis-provider/known_hosts": str(networks.folder / "known_hosts"),
        "127.0.0.1:7411:127.0.0.1:7401": f"127.0.0.1:{port}:{to}",
        "tunnel@public.example": "-p 2222 root@10.77.2.1",
    }.items():
        assert before in command
        command = command.replace(before, after)
    process = networks.run("home", *shlex.split(command))
    until(lambda: process.poll() is not None or networks.connects("public", "127.0.0.1", port))
    return process


def forwarder(networks: Networks) -> subprocess.Popen[bytes]:
    process = networks.run("public", "haproxy", "-db", "-f", str(NAT / "haproxy.cfg"))
    until(lambda: networks.connects("tenant", PUBLIC, 7401))
    return process


def test_a_tenant_asks_through_a_forwarder_that_is_killed(llama: Path, networks: Networks) -> None:
    """HAProxy and a tunnel are killed, and come back: every product is exact before and after.
    (`test_federation.py`: a tenant that trains while providers are killed has the bits of the simulation.)"""
    folder = networks.folder
    public_host(networks)
    shutil.copytree(llama, folder / "model")
    keys = folder / "keys"
    authority = create_authority(keys)
    alice = issue(keys, authority=authority, kind=Kind.TENANT, name="alice")
    listed, tunnels, addresses = [], {}, {}
    for name, (role, _) in PROVIDERS.items():
        words = f"--name {name} --role {role} --checkpoint {folder}/model --listen 127.0.0.1:0"
        words = f"init {folder}/{name}.toml {words} --public-address {name}.example:7401"
        said = CliRunner().invoke(app, words.split())
        assert f"--host {name}.example" in said.output
        identity = issue(keys, authority=None, kind=Kind.PROVIDER, name=name, hosts=[f"{name}.example"])
        serve = f"-m symbiosis_priv.cli provider serve --config {folder}/{name}.toml --ready-file {folder}/{name}.ready"
        networks.python("home", *serve.split(), stdout=subprocess.DEVNULL)
        listed.append(
            {"name": name, "operator": name, "role": role, "address": f"{name}.example:7401"}
            | {"certificate": str(identity.certificate)}
        )
    for name, (_, port) in PROVIDERS.items():
        until((folder / f"{name}.ready").exists)
        addresses[name] = (folder / f"{name}.ready").read_text()
        tunnels[name] = tunnel(networks, name, port, to=addresses[name])
    haproxy = forwarder(networks)
    assert not networks.connects("tenant", HOME, int(addresses["alpha"].rpartition(":")[2]))
    text = federation_text(
        listed, digest=WeightStore(llama).manifest().digest, certificate=alice.certificate, key=alice.key
    )
    (folder / "federation.toml").write_text(text)

    def exact(words: str) -> bool:
        command = f"-m symbiosis_priv.cli {words} --federation {folder}/federation.toml --model {folder}/model"
        asking = networks.python("tenant", *command.split(), stdout=subprocess.PIPE)
        return "alpha" in asking.communicate()[0].decode() and asking.wait(60) == 0

    assert exact("federation check"), (folder / "log").read_text()
    assert exact("verify --examples 4"), (folder / "log").read_text()
    for part in (haproxy, tunnels["alpha"]):
        part.kill()
        part.wait(20)
    assert not exact("federation check --timeout 3")
    tunnel(networks, "alpha", 7411, to=addresses["alpha"])
    forwarder(networks)
    assert exact("verify --examples 4"), (folder / "log").read_text()


def test_a_tunnels_key_opens_its_own_port_and_nothing_else(networks: Networks) -> None:
    """Neither another provider's port, nor a port of all interfaces, nor a command, nor a connection into the host."""
    public_host(networks)
    ours = tunnel(networks, "alpha", 7411, to="127.0.0.1:1")
    assert ours.poll() is None
    assert tunnel(networks, "alpha", 7412, to="127.0.0.1:1").wait(20) != 0
    base = ["ssh", "-i", str(networks.folder / "alpha"), "-o", "BatchMode=yes", "-p", "2222", "-o"]
    base += [f"UserKnownHostsFile={networks.folder}/known_hosts", "-o", "ExitOnForwardFailure=yes"]
    wide = networks.run("home", *base, "-N", "-R", "0.0.0.0:7411:127.0.0.1:1", "root@10.77.2.1")
    assert wide.wait(20) != 0
    assert networks.run("home", *base, "root@10.77.2.1", "id").wait(20) != 0
    networks.run("home", *base, "-N", "-L", "127.0.0.1:9000:127.0.0.1:2222", "root@10.77.2.1")
    until(lambda: networks.connects("home", "127.0.0.1", 9000))
    script = "import socket; s = socket.create_connection(('127.0.0.1', 9000), timeout=5); assert s.recv(1) == b''"
    assert networks.run("home", sys.executable, "-S", "-c", script).wait(20) == 0  # closed without a byte of sshd's
