"""Checks a federation. `find_gaps` finds layers without an executor, and pads with too few helpers. `probe_all` asks
the providers: certificate, role, model, layers, correct products, clock and speed.

A probe sends random rows and seeds only, and no tenant data. An executor receives random rows without a mask. A helper
receives a seed that masks no row.
"""

import math
import secrets
import statistics
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from cryptography import x509
from torch import Tensor

from symbiosis_priv import errors
from symbiosis_priv.arithmetic.keystream import SEED_BYTES, Seed, expand, mask_key, random_key
from symbiosis_priv.arithmetic.ring import DIRECTIONS, FORWARD, Direction
from symbiosis_priv.certificates import reading
from symbiosis_priv.checkpoints.layers import LayerRange, spans
from symbiosis_priv.federation import Federation, Peer
from symbiosis_priv.limits import GroupIndex
from symbiosis_priv.network import wire
from tenant.connections.channel import Channel, fresh_nonce
from tenant.connections.executor_client import row_limit
from tenant.core.masked import UNMASKED_BY_CHOICE, mask
from tenant.preparation.prepared import Preparation


@dataclass
class Finding:
    """The result of probing one provider. Fields that the probe did not reach keep their defaults."""

    peer: Peer
    failure: str | None = None  # why the provider cannot be used, with the fix
    warnings: list[str] = field(default_factory=list)  # problems that do not prevent use
    days_left: float | None = None  # until its certificate expires
    groups: dict[Direction, range] = field(default_factory=dict)  # that it serves in each direction
    verified: int = 0  # products that were compared with the verification keys
    clock_ahead_s: float | None = None  # of this machine's
    round_trip_s: float | None = None  # median time of a request without rows
    rows_per_s: float | None = None  # throughput of the largest layer group, both ways
    bytes_per_s: float | None = None


def find_gaps(federation: Federation, findings: Sequence[Finding], layers: Sequence[int]) -> list[str]:
    """Return a message with a fix for each product or pad that the providers without a failure cannot compute.
    `layers`: the layer number of every layer group of the model (`layers.layers_of`)."""
    usable = [one for one in findings if one.groups and not one.failure]
    executors = [one for one in usable if one.peer.role == "executor"]  # one for each address
    helpers = [one for one in usable if one.peer.role == "helper"]
    found = []
    for direction in DIRECTIONS:
        served = {group for executor in executors for group in executor.groups[direction]}
        if gap := [group for group in range(len(layers)) if group not in served]:
            fix = "list, start or repair an executor that serves them"
            found.append(f"{layer_text(gap, layers)} {direction}: no executor; {fix}")
    if not federation.helpers:
        return found
    for executor in executors:
        for direction in DIRECTIONS:
            short: dict[str, list[int]] = {}  # layer groups whose rows cannot be masked, by what is missing
            for group in executor.groups[direction]:
                there = [helper.peer for helper in helpers if group in helper.groups[direction]]
                if want := _want(federation, executor.peer, there):
                    short.setdefault(want, []).append(group)
            for want, groups in short.items():
                found.append(f"executor {executor.peer.name!r}, {layer_text(groups, layers)} {direction}: {want}")
    return list(dict.fromkeys(found))  # addresses of one executor may lack the same


def layer_text(groups: Collection[int], layers: Sequence[int]) -> str:
    """Format the layers of some layer groups, such as `layers 0-3, 8`."""
    found = spans(layers[group] for group in groups)
    several = len(found) > 1 or any(span != LayerRange(span.first, span.first) for span in found)
    return f"layer{'s' * several} {', '.join(map(str, found))}"


def _want(federation: Federation, executor: Peer, there: Sequence[Peer]) -> str | None:
    k = federation.pad_helpers
    if k is None:
        present = {helper.name for helper in there}
        absent = [helper.name for helper in federation.helpers if helper.name not in present]
        if not absent:
            return None
        others = f", or set [pads] helpers = {len(there)} to use the others only" if there else ""
        return (
            f"no pads without helper {', '.join(map(repr, absent))}: all helpers share every pad. Start or repair it"
            f"{others}"
        )
    admissible = [helper for helper in there if federation.admissible(executor, [helper])]
    companies = federation.companies_of(admissible)
    if companies >= k:
        return None
    return (
        f"helpers of {companies} companies other than its own, but [pads] helpers = {k}: start, repair or list "
        f"another helper that serves them"
    )


_ROUND_TRIPS = 20
_TIMED_ROWS = 64
_TIMED_PRODUCTS = 3
_SLACK_S = 1.0  # extra seconds for looking up a host name, which has no deadline
_BUSY_S = 0.05  # seconds before a request to a busy provider is repeated
_CLOCKS_APART_S = 60.0
_DAY_S = 86_400.0
_LOST = "check its address, and with its operator whether it runs"
_SLOW = f"{_LOST}; --timeout waits longer"
_verifying = threading.Lock()  # verification keys are read from one file


def probe_all(federation: Federation, preparation: Preparation | None, *, timeout: float) -> list[Finding]:
    """Probe providers in parallel, at each of their addresses. Then measure the throughput of each usable one in turn.
    Without a preparation of the pinned model, products and layers are not checked. `timeout`: seconds for each
    provider, and again for its throughput."""
    addresses = [one for peer in federation.peers for one in peer.by_address]
    probes = [ProviderProbe(federation, one, preparation) for one in addresses]
    threads = [threading.Thread(target=probe.run, args=(timeout, probe.look), daemon=True) for probe in probes]
    deadline = time.monotonic() + timeout + _SLACK_S
    for thread in threads:
        thread.start()
    for thread, probe in zip(threads, probes, strict=True):
        thread.join(max(0.0, deadline - time.monotonic()))
        if thread.is_alive():  # the thread still waits
            name = probe.finding.peer.label
            probe.finding = Finding(probe.finding.peer, f"{name} did not answer within {timeout:g} s; {_SLOW}")
            probe.close()
    for probe in probes:  # one at a time, because parallel measurements would share network and cores
        if preparation is not None and probe.finding.failure is None:
            probe.run(timeout, probe.measure)
        probe.close()
    return [probe.finding for probe in probes]


class ProviderProbe:
    """Probes one provider and records failures in `finding`. For one thread; another may `close` it."""

    def __init__(self, federation: Federation, peer: Peer, preparation: Preparation | None) -> None:
        self.finding = Finding(peer)
        self._federation, self._preparation = federation, preparation
        self._channel: Channel | None = None
        self._deadline = 0.0

    def close(self) -> None:
        if self._channel is not None:
            self._channel.close()

    def run(self, timeout: float, step: Callable[[Finding], None]) -> None:
        """Run `look` or `measure`, and record why it fails."""
        finding = self.finding
        self._deadline = time.monotonic() + timeout
        finding.failure = f"{finding.peer.label} was not probed to the end"  # if an unexpected exception ends this
        try:
            step(finding)
            finding.failure = None
        except errors.DeadlineExceededError as error:
            finding.failure = errors.one_line(f"{error}: not within {timeout:g} s; {_SLOW}")
        except errors.ConnectionLostError as error:
            finding.failure = errors.one_line(f"{error}; {_LOST}")
        except (errors.SymbiosisError, OSError) as error:
            finding.failure = errors.one_line(str(error))

    def look(self, finding: Finding) -> None:
        """Probe everything except throughput."""
        context, digest = self._federation.tls_context(finding.peer), self._federation.model_digest
        channel = self._channel = Channel(finding.peer, context=context, model_digest=digest, deadline_s=math.inf)
        groups, connection = channel.connect(deadline=self._deadline).groups, channel.connection
        assert connection is not None
        if connection.tls is not None and (shown := connection.tls.getpeercert(binary_form=True)) is not None:
            until = x509.load_der_x509_certificate(shown).not_valid_after_utc
            finding.days_left = (until - reading.now()).total_seconds() / _DAY_S
        began = time.time()
        report, _ = connection.expect(wire.HealthReport, wire.FetchHealth(), deadline=self._deadline, patient=True)
        finding.clock_ahead_s = report.time - (began + time.time()) / 2
        if abs(finding.clock_ahead_s) > _CLOCKS_APART_S:
            finding.warnings.append(
                f"the clock of {finding.peer.name} is {abs(finding.clock_ahead_s):,.0f} s "
                f"{'ahead of' if finding.clock_ahead_s > 0 else 'behind'} yours: each side checks the validity of "
                f"certificates by its own clock. Set both by NTP"
            )
        if self._preparation is not None:
            layers, wanted = self._preparation.manifest.layers, finding.peer.layers
            if groups.stop > len(layers):
                raise errors.ProtocolError(
                    f"{finding.peer.label} says it serves layer groups that the pinned model does not have"
                )
            if wanted is not None and (absent := set(wanted.groups(layers)) - set(groups)):
                raise errors.ProtocolError(
                    f"{finding.peer.label} serves {layer_text(groups, layers)}, and federation.toml expects {wanted}: "
                    f"it lacks {layer_text(absent, layers)}. Ask the operator, or correct `layers`"
                )
        finding.groups = dict.fromkeys(DIRECTIONS, groups)
        finding.round_trip_s = self._time(GroupIndex(groups.start), rows=0, times=_ROUND_TRIPS)
        if self._preparation is not None:
            self._verify(finding, groups, self._preparation)

    def _verify(self, finding: Finding, groups: range, preparation: Preparation) -> None:
        """Verify a product of one row at the first and the last group of linears, in both directions. A direction that
        the provider refuses counts as not served. Raises `ProtocolError` if a product is wrong."""
        entries = preparation.manifest.groups
        # blame keys of a stack of experts need the checkpoint, which may be gone
        linears = [index for index in groups if entries[index].experts == 1] or list(groups)
        for direction in DIRECTIONS:
            for index in map(GroupIndex, dict.fromkeys((linears[0], linears[-1]))):
                try:
                    rows, answer = self._product(index, direction, 1)
                except errors.ProviderError as error:
                    finding.warnings.append(errors.one_line(f"{direction}: {error}"))
                    finding.groups[direction] = range(0)
                    break
                with _verifying:
                    right = preparation.blame.accepts(index, direction, rows=rows, answer=answer)
                if not right:
                    preparation.forget_keys()  # as a session does after a wrong product
                    raise errors.ProtocolError(
                        f"{finding.peer.label} gives a wrong product: it is not that of the pinned weights "
                        f"({entries[index].name}, {direction}). Remove the provider from the federation file, or ask "
                        f"its operator"
                    )
                finding.verified += 1

    def measure(self, finding: Finding) -> None:
        """Measure the throughput of the largest layer group."""
        assert self._channel is not None
        groups, welcome = finding.groups[FORWARD], self._channel.connect(deadline=self._deadline)
        if not groups or self._preparation is None:
            return
        entries = self._preparation.manifest.groups
        largest = GroupIndex(max(groups, key=lambda index: entries[index].inputs * entries[index].stacked_outputs))
        inputs, outputs = entries[largest].columns(FORWARD)
        rows = min(_TIMED_ROWS, row_limit(max(inputs, outputs), welcome))
        seconds = self._time(largest, rows=rows, times=_TIMED_PRODUCTS)
        sent = inputs if finding.peer.role == "executor" else 0
        finding.rows_per_s = rows / seconds
        finding.bytes_per_s = wire.RING32.size(rows, sent + outputs) / seconds

    def _time(self, index: GroupIndex, *, rows: int, times: int) -> float:
        """Return the median seconds of a forward product."""
        seconds = []
        for _ in range(times):
            start = time.perf_counter()
            self._product(index, FORWARD, rows)
            seconds.append(time.perf_counter() - start)
        return statistics.median(seconds)

    def _product(self, index: GroupIndex, direction: Direction, rows: int) -> tuple[Tensor, Tensor]:
        """Request the product of random rows. Returns the rows and the answer."""
        inputs, outputs, key = 1, 1, random_key()  # only requests without rows are sent without a preparation
        request: wire.Execute | wire.Effect
        named: dict[str, Any] = {"nonce": fresh_nonce(), "group": index, "direction": direction, "rows": rows}
        if self.finding.peer.role == "executor":
            request = wire.Execute(**named, arithmetic="ring")
        else:
            seed = Seed(secrets.token_bytes(SEED_BYTES))
            request = wire.Effect(**named, arithmetic="ring", seed=seed, first_row=0)
        if self._preparation is not None:
            entry = self._preparation.manifest.groups[index]
            inputs, outputs = entry.columns(direction)
            if isinstance(request, wire.Effect):
                key = mask_key(seed, group_name=entry.name, direction=direction)
        sent = expand(key, first_row=0, rows=rows, width=inputs)
        payload = None if isinstance(request, wire.Effect) else mask(sent, UNMASKED_BY_CHOICE)  # rows without data
        assert self._channel is not None
        while True:
            try:
                return sent, self._channel.attempt(request, payload, outputs=outputs, deadline=self._deadline)
            except errors.ConnectionLostError as error:
                # without a cause, it is only busy
                if error.__cause__ is not None or time.monotonic() + _BUSY_S > self._deadline:
                    raise
                time.sleep(_BUSY_S)
