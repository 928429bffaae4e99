"""An executor of two ranks loses one of them while a tenant sends requests; another executor answers meanwhile."""

import os
import signal
import time
from pathlib import Path

import psutil
import pytest
import torch

from symbiosis_priv.federation import Peer
from symbiosis_priv.harness.local import METRICS, LocalFederation, ProviderOptions
from symbiosis_priv.network import wire
from tenant import RemoteConfig
from tests.end_to_end.conftest import Open


class Answers:
    """A wiretap that notes when each executor answers."""

    def __init__(self) -> None:
        self.found: list[tuple[float, str]] = []

    def sent(self, *_: object) -> None:
        pass

    def received(self, peer: Peer, message: wire.Message, _: object) -> None:
        if isinstance(message, wire.Result) and peer.role == "executor":
            self.found.append((time.monotonic(), peer.name))


@pytest.mark.skipif(not Path("/proc/self/comm").exists(), reason="the processes of ranks are found in /proc")
def test_a_lost_rank_delays_no_tenant_that_has_another_executor(llama: Path, open_model: Open, tmp_path: Path) -> None:
    answers = Answers()
    options: ProviderOptions = {"executor": {"threads": 1, "ranks": 2}, "metrics": METRICS}
    with LocalFederation(llama, tmp_path / "run", executors=2, helpers=0, provider_options=options) as local:
        remote = RemoteConfig(federation=local.federation, masking="none", wiretap=answers)
        model, ids = open_model(llama, remote, adapter=False), torch.arange(3, 9)[None]
        expected = model(input_ids=ids).logits
        victim = answers.found[-1][1]
        gateway, logged = local.pid(victim), len(local.logs(victim))
        assert gateway is not None
        before = psutil.Process(gateway).children(recursive=True)
        [rank] = [process.pid for process in before if process.name() == "rank 1"]
        lost = time.monotonic()
        os.kill(rank, signal.SIGKILL)
        while not local.status(victim)["restarts"] or not local.status(victim)["ready"]:
            assert torch.equal(model(input_ids=ids).logits, expected)
            assert time.monotonic() < lost + 120
        assert any(at >= lost and name != victim for at, name in answers.found), (
            "the other executor has not answered before the first was back"
        )
        assert '"rank": 1, "status": -9' in local.logs(victim)[logged:]
        assert len(psutil.Process(gateway).children(recursive=True)) == len(before)
