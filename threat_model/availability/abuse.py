"""`bench abuse`: measures how one tenant's abuse affects another tenant's waiting time and the provider's memory.

An honest tenant requests one row after the other, first alone and then during each abuse, and compares every answer
with its first answer. In practice an abuser has its own machine; here an abuser is a process with the lowest priority.
As a control, a process that only computes shows the effect of shared caches and cores. The provider's counters are read
before and after each abuse.
"""

import contextlib
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from symbiosis_priv.certificates.issuing import issue
from symbiosis_priv.certificates.reading import Identity, Kind
from symbiosis_priv.certificates.revocation import revoke
from symbiosis_priv.errors import DeadlineExceededError
from symbiosis_priv.federation import Federation, load_federation
from symbiosis_priv.harness.local import METRICS, LocalFederation
from symbiosis_priv.kernels import probe_rows
from tenant.bench.measured_models import HALF_THE_CORES, small_llama
from tenant.bench.options import Json, Seconds, Threads, measure, refuse_wrong
from tenant.bench.processes import Child, Resources, cpu_seconds, resources
from tenant.bench.report import Goal, Row, figure, percentile
from tenant.core.masked import UNMASKED_BY_CHOICE, mask
from threat_model.availability.abusers import DEADLINE_S, Abuse, Client, abuses, request_of, serve_abuse

_SETTLE_S, _LOOK_S = 5.0, 0.05
_COUNTERS = ("requests", "refused", "abandoned", "slow", "failed")
_MIB = 1 << 20


def abuse(
    *,
    hidden: Annotated[int, typer.Option(min=8, help="Width of the synthetic model, a multiple of 8.")] = 2048,
    seconds: Seconds = 4.0,
    visits: Annotated[int, typer.Option(min=1, help="Connections of the abuser that connects and leaves.")] = 1000,
    threads: Threads = HALF_THE_CORES,
    json: Json = None,
) -> None:
    """Measure an honest tenant's requests alone, and while others flood, read slowly, reconnect, or are revoked.

    Status 1 if one bit of an answer to the honest tenant is wrong.

    Example: symbiosis-priv bench abuse --hidden 512 --seconds 2
    """
    rows = measure(
        "abuse",
        json,
        lambda folder, progress: measure_abuse(folder, hidden=hidden, seconds=seconds, visits=visits, threads=threads),
        goals=goals,
    )
    refuse_wrong(rows, "wrong")


def goals(rows: Sequence[Row]) -> Iterator[Goal]:
    """The goals of `bench abuse`."""
    for row in rows:
        if not str(row["abuse"]).startswith("control"):
            what = f"an honest tenant's median over alone: {row['abuse']}"
            yield Goal(what, figure(row, "beside_over_alone"), at_most=1.5)


def measure_abuse(directory: Path, *, hidden: int, seconds: float, visits: int, threads: int) -> Iterator[Row]:
    """Start a provider and measure an honest tenant's requests during each abuse.

    Args:
        visits: number of connections of the abuser that connects and disconnects.
    """
    model = small_llama(hidden, inner=hidden).save(directory / "model")
    revoked = directory / "revoked.txt"
    revoked.touch()
    helper = issue(directory / "helper", authority=None, kind=Kind.PROVIDER, name="helper")
    options: dict[str, dict[str, object]] = {
        "executor": {"threads": threads},
        "tls": {"revoked": revoked},
        "metrics": METRICS,
        "relay": {"from": [helper.certificate]},
    }
    with (
        LocalFederation(model, directory / "federation", helpers=0, provider_options=options) as local,
        contextlib.closing(_Bench(local, helper, revoked, columns=(hidden, 3 * hidden), visits=visits)) as bench,
    ):
        bench.honest(seconds)  # the first requests load the weights
        for name, abuse in abuses(visits).items():
            yield bench.run(name, abuse, seconds=seconds)


class _Bench:
    def __init__(
        self, local: LocalFederation, helper: Identity, revoked: Path, *, columns: tuple[int, int], visits: int
    ) -> None:
        self._local, self._helper, self._revoked, self._visits = local, helper, revoked, visits
        self._federation: Federation = load_federation(local.federation)
        self._inputs, self._outputs = columns
        honest = Identity(self._federation.tenant_certificate, self._federation.tenant_key)
        self._channel = self._client(honest).channel()
        self._row = probe_rows(1, self._inputs)
        self._expected = self._ask()
        self._wrong = 0

    def run(self, name: str, abuse: Abuse, *, seconds: float) -> Row:
        """Measure the honest tenant alone, then during the abuse."""
        self._wrong = 0
        alone = self.honest(seconds)
        before, held = self._status(), self._held()
        abuser = self._client(self._local.issue_tenant(f"abuser-{time.monotonic_ns()}"))
        child: Child[None, bool] = Child(f"abuser of {name!r}", serve_abuse, abuse, abuser)
        try:
            child.wait_ready()
            begun = time.monotonic()
            while any(self._counted(abuser, before).get(what, 0) < least for what, least in abuse.seen.items()):
                if time.monotonic() > begun + DEADLINE_S:
                    raise DeadlineExceededError(f"the provider has not seen {name!r} within {DEADLINE_S:g} s")
                time.sleep(_LOOK_S)
            if abuse.revoked:
                time.sleep(seconds / 4)
                revoke(self._revoked, [abuser.identity.certificate])
            beside = self.honest(seconds)
            while abuse.ends and child.ask(None, timeout_s=DEADLINE_S):
                beside += self.honest(seconds / 4)
            used = cpu_seconds([child.pid])
            peak, cores = self._held(), used / (time.monotonic() - begun)
            counted = self._counted(abuser, before)
        finally:
            child.close(grace_s=0)
        left = self._left(held)
        counted |= self._counted(abuser, before)
        return {
            "abuse": name,
            "alone_p50_ms": percentile(alone, 50, unit=1e-3),
            "beside_p50_ms": percentile(beside, 50, unit=1e-3),
            "beside_over_alone": percentile(beside, 50, unit=1e-3) / percentile(alone, 50, unit=1e-3),
            "alone_p99_ms": percentile(alone, 99, unit=1e-3),
            "beside_p99_ms": percentile(beside, 99, unit=1e-3),
            "longest_ms": 1000 * max(beside),
            "wrong": self._wrong,
            "abuser_cores": cores,
            "counted": ", ".join(f"{word} {n:,}" for word, n in counted.items()) or "nothing",
            "beside_mib": (peak.bytes - held.bytes) / _MIB,
            "left_mib": (left.bytes - held.bytes) / _MIB,
            "left_files": left.files - held.files,
            "left_threads": left.threads - held.threads,
        }

    def close(self) -> None:
        """Close the honest tenant's connection."""
        self._channel.close()

    def honest(self, seconds: float) -> list[float]:
        """Send requests for `seconds` seconds, at least one. Returns the duration of each."""
        waits: list[float] = []
        end = time.monotonic() + seconds
        while (begun := time.monotonic()) < end or not waits:
            answer = self._ask()
            waits.append(time.monotonic() - begun)
            self._wrong += not torch.equal(answer, self._expected)
        return waits

    def _ask(self) -> torch.Tensor:
        return self._channel.request(request_of(1), mask(self._row, UNMASKED_BY_CHOICE), outputs=self._outputs)

    def _client(self, identity: Identity) -> Client:
        peer, digest = self._federation.executors[0], self._federation.model_digest
        return Client(identity, self._helper, peer, digest, self._inputs, self._outputs, self._visits)

    def _counted(self, abuser: Client, before: dict[str, Any]) -> dict[str, int]:
        """The increase of the provider's counters for an abuser and for unauthenticated connections since `before`."""
        name = abuser.identity.certificate.stem
        then, now = _counts(before, name), _counts(self._status(), name)
        return {what: now[what] - then[what] for what in now if now[what] > then[what]}

    def _status(self) -> dict[str, Any]:
        return self._local.status("executor")

    def _alone(self) -> bool:
        """True if only the honest tenant is connected."""
        status = self._status()
        return status["connections"] == 1 and not status["handshakes"]["present"]

    def _held(self) -> Resources:
        return resources([self._local.pid("executor") or 0])

    def _left(self, before: Resources) -> Resources:
        """The provider's resources after the abuser's connections have ended."""
        end = time.monotonic() + _SETTLE_S
        while True:
            alone, now = self._alone(), self._held()
            if (alone and now.files <= before.files and now.threads <= before.threads) or time.monotonic() > end:
                return now
            time.sleep(_LOOK_S)


def _counts(status: dict[str, Any], abuser: str) -> Counter[str]:
    handshakes = status["handshakes"]
    found = Counter({"pending handshakes": handshakes["present"] + handshakes["late"] + handshakes["crowded_out"]})
    found["connections"] = sum(n for name, n in status["visits"].items() if name.startswith(f"{abuser}@"))
    found["blocks"] = status["blocks"]["deposits"]
    for tenant in status["tenants"]:
        if tenant["tenant"].startswith(f"{abuser}@"):
            found.update({name: tenant["counts"][name] for name in _COUNTERS})
    return found
