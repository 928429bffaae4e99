"""The README's section on hosting, command by command: two operators and a tenant, each in a separate folder.

Commands are split into words as a shell does it. The test fills in the checkpoint's path, the hosts and the ports, and
copies the files that people would carry from one machine to another.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from symbiosis_priv.federation import load_federation
from symbiosis_priv.harness.base_model import private_text
from tests import warm
from tests.waiting import until

README = Path(__file__).parents[2] / "README.md"
CARRIED = {  # files that a party receives before its n-th block, and from whom
    ("beta", 0): [
        ("alpha", "keys/authority.pem", "keys/authority.pem"),
        ("alpha", "keys/revoked.txt", "keys/revoked.txt"),
    ],
    ("alpha", 1): [("alice", "keys/alice.csr", "alice.csr")],
    ("alice", 1): [
        ("alpha", "keys/alice.pem", "keys/alice.pem"),
        ("alpha", "keys/alpha.pem", "keys/alpha.pem"),
        ("beta", "keys/beta.pem", "keys/beta.pem"),
    ],
}


@dataclass
class Place:
    """Three folders that stand for three machines."""

    folder: Path
    servers: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def filled_in(self, command: str) -> str:
        command = command.replace("path/to/checkpoint", str(self.folder / "model")).replace(
            "0.0.0.0:7401", "127.0.0.1:0"
        )
        for name in self.servers:
            command = command.replace(f"{name}.example:7401", f"localhost:{self.port(name)}")
        return re.sub(r"\b(alpha|beta)\.example\b", "localhost", command)

    def port(self, name: str) -> str:
        ready = self.folder / name / "ready"
        until(lambda: ready.exists() or self.servers[name].poll() is not None, within_s=200)
        return ready.read_text().rpartition(":")[2]

    def type(self, party: str, command: str) -> str:
        """Run one command in the party's folder; a server keeps running."""
        command = self.filled_in(command)
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "SYMBIOSIS_PRIV_CACHE": str(self.folder / party / "cache")}
        where = self.folder / party
        name, *words = shlex.split(command, comments=True)
        assert name == "symbiosis-priv"
        command_line = [sys.executable, "-m", "symbiosis_priv.cli", *words]
        if "provider serve" in command:
            with (where / "log").open("wb") as log:
                self.servers[party] = warm.Popen(
                    [*command_line, "--ready-file", "ready"], cwd=where, env=environment, stderr=log
                )
            return ""
        done = warm.run(command_line, cwd=where, env=environment, capture_output=True, text=True, timeout=150)
        assert done.returncode == 0, f"{party}: {command}\n{done.stdout}{done.stderr}"
        return done.stdout + done.stderr


def blocks() -> list[tuple[str, list[str]]]:
    """(party, commands) of every block of the section, in order. The first line of a block names the party."""
    text = README.read_text(encoding="utf-8")
    section = text.split("## Host a provider, use one")[1].split("\n## ")[0]
    found = []
    for block in re.findall(r"```sh\n(.*?)```", section, re.DOTALL):
        first, *lines = re.sub(r"\\\n\s*", "", block).strip().splitlines()
        found.append((re.findall(r"^# (\w+), ", first)[0], lines))
    return found


@pytest.fixture
def place(tiny: Path, tmp_path: Path) -> Iterator[Place]:
    shutil.copytree(tiny, tmp_path / "model")
    place = Place(tmp_path)
    for party in ("alpha", "beta", "alice"):
        (tmp_path / party / "keys").mkdir(parents=True, mode=0o700)
    notes = "\n".join(record.replace("\n", " ") for record in private_text(seed=0, records=2))
    (tmp_path / "alice" / "private.txt").write_text(notes)
    (tmp_path / "alice" / "prompt.txt").write_text("The weather")
    try:
        yield place
    finally:
        for server in place.servers.values():
            server.terminate()
        for server in place.servers.values():
            server.wait(30)


def test_the_commands_of_the_hosting_section_work_as_printed(place: Place) -> None:
    said: dict[str, str] = {}
    carried = dict(CARRIED)
    turns: dict[str, int] = {}
    for party, commands in blocks():
        turn = turns[party] = turns.get(party, -1) + 1
        for sender, source, target in carried.pop((party, turn), []):
            shutil.copy(place.folder / sender / source, place.folder / party / target)
        for command in commands:
            words = " ".join(command.split()[1:3])
            said[words] = place.type(party, command)
    assert not carried
    federation = load_federation(place.folder / "alice" / "federation.toml")
    assert [(peer.name, peer.operator, peer.role) for peer in federation.peers] == [
        ("alpha", "Alpha GmbH", "executor"),
        ("beta", "Beta Ltd", "helper"),
    ]
    assert "serves the model" in said["federation check"]
    assert (place.folder / "alice" / "my-adapter" / "adapter_model.safetensors").exists()
    assert "0 answers rejected" in said["tenant generate"]
    secrets = {path.relative_to(place.folder) for path in place.folder.rglob("*.key")}
    assert {str(path) for path in secrets} == {
        "alpha/keys/authority.key",
        "alpha/keys/alpha.key",
        "beta/keys/beta.key",
        "alice/keys/alice.key",
    }
