"""Runs one process per card: `[executor] devices`, or `processes` on CPUs.

Each process is a whole provider (`serve`) with its own device, range of layers and ports, under the configuration's
name, certificate and bill. No process knows another one: tenants route rows to the address that serves their layer. A
process that ends is started again at the same port, and the others go on.

Limits of `[limits]` hold for each process. A tenant's rates are divided: each process has the part of `requests_per_s`
and `rows_per_s` that its layer groups are of all, and of the multiply-adds that its weights are. A tenant's pass asks
every process for exactly these parts, so the parts add up to the quota, for passes of up to `BURST_S`.
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from operator import itemgetter
from pathlib import Path
from subprocess import PIPE, Popen
from typing import Final

import msgspec
import torch

from provider import logs
from provider import serve as server
from provider.config.memory_plan import check_plan, memory_plan
from provider.config.provider_toml import load
from provider.config.schema import ExecutorConfig, ProviderConfig, QuotaConfig
from provider.executor.client import STARTUP_S
from provider.products.model import open_store
from symbiosis_priv.checkpoints.layers import LayerRange
from symbiosis_priv.checkpoints.weights import Progress
from symbiosis_priv.errors import ConfigError, SymbiosisError
from symbiosis_priv.kernels.chip import chip_of
from symbiosis_priv.network.addresses import parse_address, shown
from symbiosis_priv.system.files import write_atomically
from symbiosis_priv.system.interrupts import set_on_signals
from symbiosis_priv.system.pacing import Backoff
from symbiosis_priv.system.processes import end_now, when_stdin_closes

log = logs.EventLog(__name__)

BURST_S: Final = 60.0
"""A process holds the tokens of a minute: a tenant that asks one after the other must find what it has not used."""
_FIRST_BACKOFF_S, _MAX_BACKOFF_S = 0.5, 5.0
_SPARE_S = 5.0  # beyond the time in which a process stops by itself


class Card(msgspec.Struct, frozen=True, kw_only=True):
    """One process: its number, device and layers, its address, and its parts of the requests and multiply-adds of a
    pass through all layers."""

    number: int
    device: str
    layers: str
    threads: int
    listen: str
    requests: float
    work: float

    def config(self, whole: ProviderConfig) -> ProviderConfig:
        """The configuration of this process."""
        replace = msgspec.structs.replace
        executor = replace(whole.executor, device=self.device, devices=None, processes=1, threads=self.threads)
        metrics = whole.metrics.listen
        return replace(
            whole,
            listen=self.listen,
            model=replace(whole.model, layers=self.layers),
            executor=executor,
            quota=self._part(whole.quota),
            tenants={name: self._part(quota) for name, quota in whole.tenants.items()},
            metrics=replace(whole.metrics, listen=metrics and _moved(metrics, self.number)),
        )

    def _part(self, quota: QuotaConfig) -> QuotaConfig:
        parts = {"requests_per_s": self.requests, "rows_per_s": self.requests, "giga_multiply_adds_per_s": self.work}
        rates = {name: rate * part for name, part in parts.items() if (rate := getattr(quota, name)) is not None}
        return msgspec.structs.replace(quota, **rates)


def cards_of(config: ProviderConfig, *, progress: Progress | None = None) -> list[Card]:
    """Divide the served layers among the cards, by their memory. Raises `ConfigError`: there are no such cards, fewer
    layers than cards, or too little memory; and the errors of `WeightStore.manifest`."""
    devices = _devices(config.executor)
    chips = [chip_of(torch.device(device)) for device in devices]
    store = open_store(config)
    if config.executor.devices and store.cached_manifest() is None:
        # each process packs its own layers, in the form for its card
        store.each_group(lambda *_: None, progress=progress)
    manifest, served = store.manifest(progress=progress), store.served
    sizes = {index: manifest.groups[index].inputs * manifest.groups[index].stacked_outputs for index in served}
    layers: dict[int, int] = {}
    for index, size in sizes.items():
        layers[manifest.layers[index]] = layers.get(manifest.layers[index], 0) + size
    first, threads = min(layers), config.executor.threads or os.cpu_count() or 1
    cards, needs = [], []
    for number, part in enumerate(divided(list(layers.values()), [chip.memory if chip else 1 for chip in chips])):
        own = LayerRange(first + part.start, first + part.stop - 1)
        groups = own.groups(manifest.layers)
        card = Card(
            number=number,
            device=devices[number],
            layers=str(own),
            threads=max(1, threads // len(devices)),
            listen=_moved(config.listen, number),
            requests=len(groups) / len(served),
            work=sum(sizes[index] for index in groups) / sum(sizes.values()),
        )
        cards.append(card)
        needs += memory_plan(card.config(config), manifest, groups)
    check_plan(needs, multiplies=False)
    return cards


def divided(sizes: Sequence[int], memory: Sequence[int]) -> list[range]:
    """Ranges of layers, one for each card and none empty, such that the fullest card is as empty as possible relative
    to its memory. Raises `ConfigError`: there are fewer layers than cards."""
    if len(sizes) < len(memory):
        raise ConfigError(
            f"{len(memory)} cards cannot divide {len(sizes)} layers: list fewer devices, or choose ranks = "
            f"{len(memory)} for a layer that is too large for a card"
        )
    best: dict[int, tuple[float, list[range]]] = {0: (0.0, [])}  # by the layers so far: the fullest card's load, ranges
    for room in memory:
        ways = [
            (max(load, sum(sizes[start:end]) / room), [*parts, range(start, end)])
            for start, (load, parts) in best.items()
            for end in range(start + 1, len(sizes) + 1)
        ]
        best = {parts[-1].stop: (load, parts) for load, parts in sorted(ways, key=itemgetter(0), reverse=True)}
    return best[len(sizes)][1]


def _devices(settings: ExecutorConfig) -> Sequence[str]:
    if settings.devices is None:
        return ["cpu"] * settings.processes
    there = [f"cuda:{index}" for index in range(torch.cuda.device_count())]
    wanted = there if settings.devices == "all" else settings.devices
    if not wanted or not set(wanted) <= set(there):
        raise ConfigError(f"devices = {settings.devices!r}: torch sees {', '.join(there) or 'no GPU'} on this machine")
    return wanted


def _moved(address: str, number: int) -> str:
    """The address with the port of this process; port 0 stays."""
    host, port = parse_address(address)
    if port + number >= 1 << 16:
        raise ConfigError(f"listen = {address!r}: each card takes the next port; choose a lower one")
    return shown(host, port and port + number)


class _Process:
    """Keeps the process of one card running, in a thread."""

    def __init__(self, card: Card, source: Path) -> None:
        self.card, self._source = card, source
        self.ready, self.ended = threading.Event(), threading.Event()
        self._stopping = threading.Event()
        self._process: Popen[bytes] | None = None
        self._listens = False
        self._thread = threading.Thread(target=self._run, name=f"card-{card.number}", daemon=True)
        self._thread.start()

    def signal(self, number: int) -> None:
        if (process := self._process) is not None and process.poll() is None:
            process.send_signal(number)

    def reload(self) -> None:
        """Let the process read its files again. One that starts reads them later, and SIGHUP would end it."""
        if self._listens:
            self.signal(signal.SIGHUP)

    def stop(self) -> None:
        self._stopping.set()
        self.signal(signal.SIGTERM)

    def join(self, until: float) -> None:
        """Wait for the end of the process, and kill it after `until`."""
        self._thread.join(max(0.0, until - time.monotonic()))
        self.signal(signal.SIGKILL)

    def _run(self) -> None:
        backoff = Backoff(_FIRST_BACKOFF_S, _MAX_BACKOFF_S)
        while not self._stopping.is_set():
            status = None
            try:
                status = self._live(backoff)
            except Exception as error:  # for example no process, descriptor or memory was free
                log.failure("card_not_started", error)
            if self._stopping.is_set() or not self.ready.is_set():  # a first start that fails is not repeated
                break
            log.warning("card_ended", card=self.card.number, status=status)
            self._stopping.wait(backoff.failed())
        self.ended.set()

    def _live(self, backoff: Backoff) -> int:
        """Start the process, and wait until it has ended. Returns its status."""
        words = str(self._source), msgspec.json.encode(self.card).decode()
        with Popen([sys.executable, "-m", "provider.processes.cards", *words], stdin=PIPE, stdout=PIPE) as process:
            self._listens, self._process = False, process
            if self._stopping.is_set():  # `stop` has not seen this process
                process.terminate()
            log.info("card_started", card=self.card.number, layers=self.card.layers, pid=process.pid)
            assert process.stdout is not None
            for line in process.stdout:  # until it ends
                with suppress(OSError):  # nobody reads it any more
                    os.write(1, line)
                if b'"event": "listening"' in line:
                    self._listens = True
                    self.card = msgspec.structs.replace(self.card, listen=msgspec.json.decode(line)["address"])
                    self.ready.set()
                    backoff.succeeded()
        return process.returncode


def serve(
    config: ProviderConfig,
    *,
    source: Path,
    ready_file: Path | None = None,
    stop_with_stdin: bool = False,
    progress: Progress | None = None,
    on_ready: Callable[[], None] = lambda: None,
) -> None:
    """Run a process for each card until SIGTERM or SIGINT; like `provider.serve.serve`. Each prints its own line of
    JSON when it is ready, and the ready file has all addresses. Raises `ConfigError`: a process did not start."""
    logs.setup(config.log_level)
    stop, started = threading.Event(), threading.Event()
    on_signal = set_on_signals(stop, starting=lambda: not started.is_set())
    processes: list[_Process] = []

    def reload(*_: object) -> None:
        for process in processes:
            process.reload()

    signal.signal(signal.SIGHUP, reload)
    try:
        cards = cards_of(config, progress=progress)
        started.set()
        processes += (_Process(card, source) for card in cards)
        if stop_with_stdin:
            when_stdin_closes(on_signal)
        deadline = time.monotonic() + STARTUP_S
        for process in processes:
            while not stop.is_set() and not process.ready.wait(_FIRST_BACKOFF_S):
                if process.ended.is_set() or time.monotonic() > deadline:
                    raise ConfigError(f"the process of card {process.card.number} did not start: read the reason above")
        if not stop.is_set():
            if ready_file is not None:
                write_atomically(ready_file, " ".join(process.card.listen for process in processes).encode())
            on_ready()
            stop.wait()
    except KeyboardInterrupt:
        log.info("stopped_while_starting", provider=config.name)
    finally:
        until = time.monotonic() + 2 * config.limits.stop_timeout_s + _SPARE_S
        for process in processes:
            process.stop()
        for process in processes:
            process.join(until)


def main() -> None:
    """Run the process of one card, until its parent ends. Exits with status 1 if it cannot start."""
    source, card = Path(sys.argv[1]), msgspec.json.decode(sys.argv[2], type=Card)
    try:
        config = card.config(load(source))
        server.serve(config, source=source, adapt=card.config, burst_s=BURST_S, stop_with_stdin=True)
    except SymbiosisError as error:
        sys.exit(f"error: {error}")
    end_now()


if __name__ == "__main__":
    main()
