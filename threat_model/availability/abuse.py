"""`bench abuse`: what one tenant's abuse costs another: waits beside those without it, bits, what the provider keeps.

An honest tenant asks for one row after the other, first alone and then beside each abuse, and compares every answer
with the first. An abuser would sit at a machine of its own: here it is a process that gets the time of a core that
nobody else wants. What that alone costs, as it shares caches and cores, the control says: a process that only computes.
What the provider's counters say, and of whom, is read before and after.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from symbiosis_priv.certificates import Identity, Kind, issue
from symbiosis_priv.certificates.revocation import revoke
from symbiosis_priv.errors import DeadlineExceededError
from symbiosis_priv.federation import Federation, load_federation
from symbiosis_priv.harness.local import LocalFederation
from tenant.bench import processes
from tenant.bench.report import Row
from tenant.bench.status import METRICS, status_of
from tenant.connections.channel import Channel
from threat_model.availability.abusers import DEADLINE_S, Abuse, Abuser, abuses, request_of, start

_SETTLE_S, _LOOK_S = 5.0, 0.05
_COUNTERS = ("requests", "refused", "abandoned", "slow", "failed")
_MIB = 1 << 20


def measure_abuse(
    directory: Path,
    *,
    hidden: int,
    seconds: float,
    threads: int,
    on_result: Callable[[Row], None],
    visits: int = 1000,
) -> None:
    """Start a provider and let an honest tenant ask it beside each abuse.

    Args:
        directory: new or empty.
        hidden: width of the model.
        seconds: of each measurement.
        threads: torch threads of the provider.
        on_result: told every line as soon as it is there.
        visits: connections of whoever comes and goes.
    """
    model = directory / "model"
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=hidden,
        num_hidden_layers=1,
        num_attention_heads=4,
        vocab_size=64,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).save_pretrained(model)
    revoked = directory / "revoked.txt"
    revoked.touch()
    options: dict[str, dict[str, object]] = {
        "executor": {"threads": threads},
        "tls": {"revoked": revoked},
        "metrics": METRICS,
    }
    with (
        LocalFederation(model, directory / "federation", helpers=0, provider_options=options) as local,
        contextlib.closing(_Bench(local, revoked, columns=(hidden, 3 * hidden), visits=visits)) as bench,
    ):
        bench.honest(seconds)  # the first requests load the weights
        for name, abuse in abuses(visits).items():
            on_result(bench.run(name, abuse, seconds=seconds))


class _Bench:
    def __init__(self, local: LocalFederation, revoked: Path, *, columns: tuple[int, int], visits: int) -> None:
        self._local, self._revoked, self._visits = local, revoked, visits
        self._federation: Federation = load_federation(local.federation)
        self._inputs, self._outputs = columns
        peer = self._federation.executors[0]
        self._channel = Channel(
            peer,
            certificate=self._federation.tenant_certificate,
            key=self._federation.tenant_key,
            model_digest=self._federation.model_digest,
            deadline_s=DEADLINE_S,
        )
        generator = torch.Generator().manual_seed(0)
        self._row = torch.randint(
            -(1 << 31), 1 << 31, (1, self._inputs), generator=generator, dtype=torch.int64, device="cpu"
        ).int()
        self._expected = self._ask()
        self._wrong = 0

    def run(self, name: str, abuse: Abuse, *, seconds: float) -> Row:
        """The honest tenant alone, then beside the abuse."""
        self._wrong = 0
        alone = self.honest(seconds)
        before, held = self._status(), self._held()
        abuser = self._abuser()
        process, begun = start(abuse, abuser), time.monotonic()
        assert process.pid is not None  # it has been started
        try:
            while any(self._counted(abuser, before).get(what, 0) < least for what, least in abuse.seen.items()):
                if time.monotonic() > begun + DEADLINE_S:
                    raise DeadlineExceededError(f"the provider has not seen {name!r} within {DEADLINE_S:g} s")
                time.sleep(_LOOK_S)
            if abuse.revoked:
                time.sleep(seconds / 4)
                revoke(self._revoked, [abuser.identity.certificate])
            beside, used = self.honest(seconds), processes.cpu_seconds([process.pid])
            while abuse.ends and process.is_alive():
                beside += self.honest(seconds / 4)
                used = max(used, processes.cpu_seconds([process.pid]))
            peak, cores = self._held(), used / (time.monotonic() - begun)
            counted = self._counted(abuser, before)
        finally:
            process.kill()
            process.join()
        left = self._left(held)
        counted |= self._counted(abuser, before)
        return {
            "abuse": name,
            "alone_p50_ms": _percentile(alone, 50),
            "beside_p50_ms": _percentile(beside, 50),
            "beside_over_alone": _percentile(beside, 50) / _percentile(alone, 50),
            "alone_p99_ms": _percentile(alone, 99),
            "beside_p99_ms": _percentile(beside, 99),
            "longest_ms": 1000 * max(beside),
            "wrong": self._wrong,
            "abuser_cores": cores,
            "counted": ", ".join(f"{word} {n:,}" for word, n in counted.items()) or "nothing",
            "beside_mib": (peak[0] - held[0]) / _MIB,
            **dict(zip(("left_mib", "left_files", "left_threads"), left, strict=True)),
        }

    def close(self) -> None:
        """The honest tenant leaves."""
        self._channel.close()

    def honest(self, seconds: float) -> list[float]:
        """Seconds of each request."""
        waits, end = [], time.monotonic() + seconds
        while (begun := time.monotonic()) < end:
            answer = self._ask()
            waits.append(time.monotonic() - begun)
            self._wrong += not torch.equal(answer, self._expected)
        return waits

    def _ask(self) -> torch.Tensor:
        return self._channel.request(request_of(1), self._row, outputs=self._outputs)

    def _abuser(self) -> Abuser:
        """Somebody new, with a good certificate."""
        keys = self._local.directory / "keys"
        authority = Identity(certificate=keys / "authority.pem", key=keys / "authority.key")
        identity = issue(keys, authority=authority, kind=Kind.TENANT, name=f"abuser-{time.monotonic_ns()}")
        peer, digest = self._federation.executors[0], self._federation.model_digest
        return Abuser(identity, peer, digest, self._inputs, self._outputs, self._visits)

    def _counted(self, abuser: Abuser, before: dict[str, Any]) -> dict[str, int]:
        """What the provider has counted since of an abuser, and of those who have no name."""
        name = abuser.identity.certificate.stem
        then, now = _counts(before, name), _counts(self._status(), name)
        return {what: now[what] - then[what] for what in now if now[what] > then[what]}

    def _status(self) -> dict[str, Any]:
        return status_of(self._local, "executor")

    def _alone(self) -> bool:
        """Whether nobody but the honest tenant is connected."""
        status = self._status()
        return status["connections"] == 1 and not status["handshakes"]["present"]

    def _held(self) -> tuple[int, int, int]:
        """(bytes, open files, threads) of the provider."""
        folder = Path(f"/proc/{self._local.pid('executor')}")
        pages = int((folder / "statm").read_text().split()[1])
        files, tasks = (len(list((folder / kind).iterdir())) for kind in ("fd", "task"))
        return pages * os.sysconf("SC_PAGE_SIZE"), files, tasks

    def _left(self, before: tuple[int, int, int]) -> tuple[float, int, int]:
        """What is more than before, when everybody has gone."""
        end = time.monotonic() + _SETTLE_S
        while True:
            alone, now = self._alone(), self._held()
            if (alone and now[1] <= before[1] and now[2] <= before[2]) or time.monotonic() > end:
                break
            time.sleep(_LOOK_S)
        return (now[0] - before[0]) / _MIB, now[1] - before[1], now[2] - before[2]


def _percentile(waits: list[float], q: int) -> float:
    return float(np.percentile(np.array(waits) * 1000, q))


def _counts(status: dict[str, Any], abuser: str) -> Counter[str]:
    handshakes = status["handshakes"]
    found = Counter({"strangers": handshakes["present"] + handshakes["late"] + handshakes["crowded_out"]})
    found["connections"] = sum(n for name, n in status["visits"].items() if name.startswith(f"{abuser}@"))
    for tenant in status["tenants"]:
        if tenant["tenant"].startswith(f"{abuser}@"):
            found.update({name: tenant["counts"][name] for name in _COUNTERS})
    return found
