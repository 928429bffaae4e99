"""Groups of ranks that have a gateway each, as `provider.processes.launch` starts them."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

from symbiosis_priv.harness.local import consecutive_ports
from tests import warm


class Group:
    """The ranks of a provider.toml, each with a gateway, on `hosts` machines that are all this one."""

    def __init__(self, path: Path, ranks: int, *, hosts: int = 1) -> None:
        self.log_file = path.with_name("log")
        port = consecutive_ports("127.0.0.1")
        place = [] if hosts == 1 else ["--nnodes", hosts, "--master-addr", "127.0.0.1", "--master-port", port]
        self.nodes, ready = [], []
        environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
        with self.log_file.open("wb") as log:
            for host in range(hosts):
                words = [*place, *(["--node-rank", host] if place else []), "--nproc-per-node", ranks // hosts]
                words += ["-m", "provider.processes.rank", "--config", path]
                command = [sys.executable, "-m", "provider.processes.launch", *map(str, words)]
                self.nodes.append(
                    warm.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=log, start_new_session=True)
                )
        for node in self.nodes:
            assert node.stdout is not None
            for _ in range(ranks // hosts):
                if not (line := node.stdout.readline()):
                    self.close()
                    raise AssertionError(self.log_file.read_text())
                ready.append(json.loads(line))
        ready.sort(key=lambda line: int(line["rank"]))
        self.metrics = ready[0].get("metrics")
        self.places = [SimpleNamespace(**{key: line[key] for key in ("address", "model_digest")}) for line in ready]

    def pids(self) -> dict[int, int]:
        """Process ids by rank, on one host."""
        agent = self.nodes[0].pid
        children = Path(f"/proc/{agent}/task/{agent}/children").read_text().split()
        names = {int(pid): Path(f"/proc/{pid}/comm").read_text().split() for pid in children}
        return {int(number): pid for pid, (name, number) in names.items()}

    def close(self) -> None:
        for node in self.nodes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(node.pid, signal.SIGKILL)
            node.wait(20)
            assert node.stdout is not None
            node.stdout.close()
