"""Checks a federation. `find_gaps` finds layers without an executor, and pads with too few helpers. `probe_all` asks
the providers: certificate, role, model, layers, correct products, clock and speed.

A probe sends random rows and seeds only, and no tenant data. An executor receives random rows without a mask. A helper
receives a seed that masks no row.
"""

import secrets
import statistics
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec
import torch
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
from symbiosis_priv.network.dial import ClientConnection
from tenant.connections.channel import fresh_nonce
from tenant.core.masked import UNMASKED_BY_CHOICE, MaskedRows, mask
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


R = TypeVar("R", bound=msgspec.Struct)
_ROUND_TRIPS = 20
_TIMED_ROWS = 64
_TIMED_PRODUCTS = 3
_SLACK_S = 1.0  # extra seconds for looking up a host name, which has no deadline
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
    threads = [threading.Thread(target=probe.run, args=(timeout,), daemon=True) for probe in probes]
    deadline = time.monotonic() + timeout + _SLACK_S
    for thread in threads:
        thread.start()
    for thread, probe in zip(threads, probes, strict=True):
        thread.join(max(0.0, deadline - time.monotonic()))
        if thread.is_alive():
            probe.abort(f"{probe.name} did not answer within {timeout:g} s; {_SLOW}")
    for probe in probes:  # one at a time, because parallel measurements would share network and cores
        if preparation is not None and probe.finding.failure is None:
            probe.measure(timeout)
        probe.close()
    return [probe.finding for probe in probes]


class ProviderProbe:
    """Probes one provider and records failures in `finding`. For one thread; another thread may call `abort`."""

    def __init__(self, federation: Federation, peer: Peer, preparation: Preparation | None) -> None:
        self.finding = Finding(peer)
        self.name = peer.label
        self._federation = federation
        self._preparation = preparation
        self._connection: ClientConnection | None = None
        self._welcome: wire.Welcome | None = None
        self._deadline = 0.0

    def run(self, timeout: float) -> None:
        """Probe everything except throughput."""
        self._guarded(timeout, self._look)

    def measure(self, timeout: float) -> None:
        self._guarded(timeout, self._measure)

    def abort(self, failure: str) -> None:
        """Replace the finding by a failure and break the connection, while the probing thread still waits."""
        self.finding = Finding(self.finding.peer, failure)
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.shut()

    def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def _guarded(self, timeout: float, step: Callable[[Finding], None]) -> None:
        finding = self.finding
        self._deadline = time.monotonic() + timeout
        finding.failure = f"{self.name} was not probed to the end"  # in case an unexpected exception ends this thread
        try:
            step(finding)
            finding.failure = None
        except errors.DeadlineExceededError as error:
            finding.failure = errors.one_line(f"{error}: not within {timeout:g} s; {_SLOW}")
        except errors.ConnectionLostError as error:
            finding.failure = errors.one_line(f"{error}; {_LOST}")
        except (errors.SymbiosisError, OSError) as error:
            finding.failure = errors.one_line(str(error))

    def _look(self, finding: Finding) -> None:
        federation, peer = self._federation, finding.peer
        connection = self._connection = peer.connection(federation.tls_context(peer))
        connection.open(self._deadline)
        if connection.tls is not None and (shown := connection.tls.getpeercert(binary_form=True)) is not None:
            until = x509.load_der_x509_certificate(shown).not_valid_after_utc
            finding.days_left = (until - reading.now()).total_seconds() / _DAY_S
        began = time.time()
        report, _ = self._expect(wire.HealthReport, wire.FetchHealth())
        finding.clock_ahead_s = report.time - (began + time.time()) / 2
        if abs(finding.clock_ahead_s) > _CLOCKS_APART_S:
            finding.warnings.append(
                f"the clock of {finding.peer.name} is {abs(finding.clock_ahead_s):,.0f} s "
                f"{'ahead of' if finding.clock_ahead_s > 0 else 'behind'} yours: each side checks the validity of "
                f"certificates by its own clock. Set both by NTP"
            )
        groups = self._hello().groups
        if self._preparation is not None:
            layers = self._preparation.manifest.layers
            if groups.stop > len(layers):
                raise errors.ProtocolError(
                    f"{self.name} says it serves layer groups that the pinned model does not have"
                )
            wanted = finding.peer.layers
            if wanted is not None and (absent := set(wanted.groups(layers)) - set(groups)):
                raise errors.ProtocolError(
                    f"{self.name} serves {layer_text(groups, layers)}, and federation.toml expects {wanted}: "
                    f"it lacks {layer_text(absent, layers)}. Ask the operator, or correct `layers`"
                )
        finding.groups = dict.fromkeys(DIRECTIONS, groups)
        times = []
        for _ in range(_ROUND_TRIPS):
            start = time.perf_counter()
            self._product(GroupIndex(groups.start), FORWARD, 0)
            times.append(time.perf_counter() - start)
        finding.round_trip_s = statistics.median(times)
        if self._preparation is not None:
            self._verify(finding, groups, self._preparation)

    def _hello(self) -> wire.Welcome:
        digest = self._federation.model_digest
        role = self.finding.peer.role
        hello = wire.Hello(version=wire.version_of(32, role=role), role=role, model_digest=digest)
        self._welcome, _ = self._expect(wire.Welcome, hello)
        if self._welcome.model_digest != digest:
            raise errors.ProtocolError(f"{self.name} does not serve the pinned model")
        if role == "helper":
            assert self._connection is not None
            self._connection.agree(deadline=self._deadline)
        return self._welcome

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
                    name = preparation.manifest.groups[index].name
                    raise errors.ProtocolError(
                        f"{self.name} gives a wrong product: it is not that of the pinned weights ({name}, "
                        f"{direction}). Remove the provider from the federation file, or ask its operator"
                    )
                finding.verified += 1

    def _measure(self, finding: Finding) -> None:
        assert self._preparation is not None
        assert self._welcome is not None
        entries = self._preparation.manifest.groups
        groups = finding.groups[FORWARD]
        if not groups:
            return
        largest = GroupIndex(max(groups, key=lambda index: entries[index].inputs * entries[index].stacked_outputs))
        inputs, outputs = entries[largest].columns(FORWARD)
        row_bytes = wire.RING32.size(1, max(inputs, outputs))
        rows = max(1, min(_TIMED_ROWS, self._welcome.max_rows, self._welcome.max_payload // row_bytes))
        times = []
        for _ in range(_TIMED_PRODUCTS):
            start = time.perf_counter()
            self._product(largest, FORWARD, rows)
            times.append(time.perf_counter() - start)
        seconds = statistics.median(times)
        sent = inputs if finding.peer.role == "executor" else 0
        finding.rows_per_s = rows / seconds
        finding.bytes_per_s = wire.RING32.size(rows, sent + outputs) / seconds

    def _product(self, index: GroupIndex, direction: Direction, rows: int) -> tuple[Tensor, Tensor]:
        """Request the product of random rows. Returns the rows and the answer."""
        inputs = outputs = 1  # only requests without rows are sent without a preparation
        if self._preparation is not None:
            inputs, outputs = self._preparation.manifest.groups[index].columns(direction)
        if self.finding.peer.role == "executor":
            sent = expand(random_key(), first_row=0, rows=rows, width=inputs)
            request: wire.Execute | wire.Effect = wire.Execute(
                nonce=fresh_nonce(), group=index, direction=direction, arithmetic="ring", rows=rows
            )
            return sent, self._answer(request, mask(sent, UNMASKED_BY_CHOICE), outputs)  # random rows hold no data
        seed = Seed(secrets.token_bytes(SEED_BYTES))
        request = wire.Effect(
            nonce=fresh_nonce(), group=index, direction=direction, arithmetic="ring", rows=rows, seed=seed, first_row=0
        )
        answer = self._answer(request, None, outputs)
        if not rows:
            return torch.empty((0, inputs), dtype=torch.int32, device="cpu"), answer
        assert self._preparation is not None
        key = mask_key(seed, group_name=self._preparation.manifest.groups[index].name, direction=direction)
        return expand(key, first_row=0, rows=rows, width=inputs), answer

    def _answer(self, request: wire.Execute | wire.Effect, payload: MaskedRows | None, outputs: int) -> Tensor:
        size = request.encoding.size(request.rows, outputs)
        result, body = self._expect(wire.Result, request, payload, max_payload=size)
        if not result.answers(request) or len(body) != size:
            raise errors.ProtocolError(f"{self.name} answered another request than the one that was sent")
        return request.encoding.unpack(body, rows=request.rows).view(request.rows, outputs)

    def _expect(
        self, kind: type[R], message: wire.Message, payload: MaskedRows | None = None, **how: Any
    ) -> tuple[R, bytearray]:
        assert self._connection is not None
        words = None if payload is None else payload.masked_words
        return self._connection.expect(kind, message, words, deadline=self._deadline, patient=True, **how)
