"""Starts and stops a whole provider: model, executor, gateway, announcements and metrics."""

import ctypes
import gc
import resource
import signal
import threading
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Self

import msgspec

from provider import logs
from provider.announce.announcer import Announcer
from provider.announce.placement import placed
from provider.config.memory_plan import check_plan, memory_plan
from provider.config.provider_toml import load
from provider.config.reload import Reloader
from provider.config.schema import ProviderConfig
from provider.executor import supervisor
from provider.executor.client import ExecutorHandle
from provider.gateway.credentials import Credentials
from provider.gateway.gateway import MAX_HANDSHAKES, Gateway
from provider.gateway.usage import UsageCounters
from provider.operations.status import Status, take_status
from provider.products.model import open_store
from symbiosis_priv.checkpoints.manifest import price_of_composing
from symbiosis_priv.checkpoints.weights import Progress
from symbiosis_priv.errors import ConfigError
from symbiosis_priv.network.addresses import listen
from symbiosis_priv.network.hybrid import require_hybrid
from symbiosis_priv.system.files import write_atomically
from symbiosis_priv.system.interrupts import set_on_signals
from symbiosis_priv.system.processes import when_stdin_closes

if TYPE_CHECKING:  # set in `start`
    from provider.operations.metrics import MetricsServer

log = logs.EventLog(__name__)

_SPARE_DESCRIPTORS = 128
_M_ARENA_MAX = -8  # malloc.h


class Provider:
    """A provider in this process. Its executor may be a child process.

        with Provider(config) as provider:
            connect_to(provider.address)

    The file `source` of the configuration is read again when it changes, and passed through `adapt`. Quotas
    hold `burst_s`."""

    def __init__(
        self,
        config: ProviderConfig,
        *,
        source: Path | None = None,
        progress: Progress | None = None,
        adapt: Callable[[ProviderConfig], ProviderConfig] = lambda config: config,
        burst_s: float = 1.0,
    ) -> None:
        self._adapt, self._burst_s = adapt, burst_s
        self.config = self._first = self._reloaded = config  # as first and as last read, before layers are chosen
        self._source, self._progress = source, progress
        self._credentials: Credentials | None = None
        self._gateway: Gateway | None = None
        self._announcer: Announcer | None = None
        self._metrics: MetricsServer | None = None

    @property
    def address(self) -> str:
        """The bound address, as `host:port`."""
        assert self._gateway is not None, "start it first"
        return self._gateway.listener.address

    @property
    def metrics_address(self) -> str | None:
        """The bound address for operators, as `host:port`; None if there is none."""
        return None if self._metrics is None else self._metrics.address

    def status(self) -> Status:
        assert self._gateway is not None, "start it first"
        return take_status(self._gateway, self.executor, self._announcer, self._reloader, self._reloaded)

    def start(self) -> Self:
        """Quantise the model if necessary, start the executor, and listen. Raises `ConfigError`: the address is in use,
        or the executor does not start; `CertificateError`: a certificate, a key or the revocation list cannot be used;
        `CheckpointError`, `UnsupportedModelError`: the model cannot be read or served."""
        if self.config.executor.per_card:
            raise ConfigError("devices and processes under [executor] are for `symbiosis-priv provider serve`")
        self._reloader = Reloader(self._watched_files, self._reload)  # later changes are reloaded
        _require_free(self.config)
        if "helper" in self.config.roles:
            require_hybrid('roles = ["helper"]')
        config = self.config = placed(self.config, progress=self._progress)
        self._credentials = credentials = Credentials.load(config.tls)
        store = open_store(config)
        manifest, served = store.manifest(progress=self._progress), store.served
        self.model_digest = manifest.digest
        alone = config.executor.ranks == 1 and not config.executor.own_process
        check_plan(memory_plan(config, manifest, served), multiplies=alone)
        self.executor: ExecutorHandle
        self._usage = UsageCounters(config.usage.database)
        self.executor = supervisor.make(config, model_digest=manifest.digest)
        try:
            self.executor.start()
            self._gateway = gateway = Gateway(
                config,
                manifest=manifest,
                served=served,
                credentials=credentials,
                executor=self.executor,
                usage=self._usage,
            )
            gateway.state.quotas.burst_s = self._burst_s
            gateway.listener.start()
            self._reloader.periodic.start()
            if config.registry.announce:
                self._announcer = Announcer(config, address=self.address, manifest=manifest, served=served)
                self._announcer.periodic.start()
            if config.metrics.listen is not None:
                # imports Prometheus' client, which most providers do not need
                from provider.operations.metrics import MetricsServer

                self._metrics = MetricsServer(config.metrics.listen, self.status, hosts=config.metrics.hosts)
        except BaseException:
            if self._gateway is None:
                self.executor.stop(config.limits.stop_timeout_s)
                self.executor.close()
                self._usage.close()
            else:
                self.stop()
            raise
        memory, work = price_of_composing(manifest.groups[served.start : served.stop])
        composed: dict[str, str | int] = {}
        if memory > 1:
            composed = {"round_trips": 2, "memory": f"x{memory:.2f}", "multiply_adds_of_a_token": f"x{work:.2f}"}
        log.info("started", provider=config.name, address=gateway.listener.address, groups=len(served), **composed)
        return self

    def stop(self) -> None:
        """Tell the registries, accept no more connections, answer requests in flight, and close. Returns within twice
        `limits.stop_timeout_s`, plus the seconds that a registry takes."""
        if self._gateway is None:
            return
        timeout = self.config.limits.stop_timeout_s
        if self._announcer is not None:
            self._announcer.leave()
            self._announcer = None
        self._reloader.periodic.close(timeout)
        clean = self._gateway.stop(timeout)
        requests = self._usage.requests()
        self.executor.stop(timeout)
        if clean:  # otherwise a socket is still open, and closing the context would wait for it
            self.executor.close()
        if self._metrics is not None:
            self._metrics.close()
            self._metrics = None
        self._gateway = None
        self._usage.close()
        log.info("stopped", provider=self.config.name, requests=requests, clean=clean)

    def reload(self) -> None:
        """Read certificates, revocations and quotas again soon. If one of them is invalid, it is logged and
        nothing changes."""
        if self._gateway is not None:
            self._reloader.request()

    def _reload(self) -> None:
        assert self._gateway is not None
        assert self._credentials is not None
        # revocations first: no mistake in another file holds one back
        revoking = self._credentials.revoking(self._reloaded.tls.revoked)
        if revoking.revoked != self._credentials.revoked:
            self._credentials = revoking
            self._gateway.accept(revoking)
        config = self.config if self._source is None else self._adapt(load(self._source, whole=True))
        credentials = Credentials.load(config.tls, before=self._credentials)
        self._gateway.state.quotas.renew(config.quota_of)
        self._gateway.accept(credentials)
        self._credentials, self._reloaded = credentials, config
        if self._announcer is not None:
            self._announcer.periodic.wake()  # the configuration or the certificate may have changed
        fixed = msgspec.structs.replace(config, quota=self._first.quota, tenants=self._first.tenants)
        log.info("reloaded", needs_restart=None if fixed == self._first else "yes: other settings have changed too")

    def _watched_files(self) -> list[Path]:
        tls = self._reloaded.tls  # it may name other files than at the start
        files = [self._source, tls.certificate, tls.key, tls.tenant_authority, tls.revoked]
        return [path for path in files if path is not None]

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()


def serve(
    config: ProviderConfig,
    *,
    source: Path | None = None,
    ready_file: Path | None = None,
    stop_with_stdin: bool = False,
    progress: Progress | None = None,
    on_ready: Callable[[], None] = lambda: None,
    adapt: Callable[[ProviderConfig], ProviderConfig] = lambda config: config,
    burst_s: float = 1.0,
) -> None:
    """Run a `Provider` until SIGTERM or SIGINT. When ready, write the bound address to `ready_file`, and print one line
    of JSON to stdout; logs go to stderr. SIGHUP and changed files make the provider read certificates, revocations and
    quotas again. With `stop_with_stdin`, the provider ends with its parent."""
    logs.setup(config.log_level)
    allow_descriptors(config)
    _share_arenas()
    stop, started = threading.Event(), threading.Event()
    provider = Provider(config, source=source, progress=progress, adapt=adapt, burst_s=burst_s)
    on_signal = set_on_signals(stop, starting=lambda: not started.is_set())
    signal.signal(signal.SIGHUP, lambda *_: provider.reload())
    try:
        provider.start()
        started.set()
    except KeyboardInterrupt:
        log.info("stopped_while_starting", provider=config.name)
    gc.freeze()  # no later collection examines torch's modules again, in particular the last one
    try:
        if not stop.is_set():
            if ready_file is not None:
                write_atomically(ready_file, provider.address.encode())
            ready = {"address": provider.address, "model_digest": provider.model_digest}
            if provider.metrics_address is not None:
                ready["metrics"] = provider.metrics_address
            on_ready()
            logs.announce("listening", **ready)
            if stop_with_stdin:
                when_stdin_closes(on_signal)
            stop.wait()
    finally:
        provider.stop()


def _require_free(config: ProviderConfig) -> None:
    """Raises `ConfigError` if an address is in use or cannot be used: now, and not after minutes of quantising."""
    with ExitStack() as both:
        both.enter_context(listen(config.listen))
        if config.metrics.listen is not None:
            try:
                both.enter_context(listen(config.metrics.listen))
            except ConfigError as error:
                raise ConfigError(f"[metrics] {error}") from error


def _share_arenas() -> None:
    """Let all threads share two arenas of glibc's allocator. With an arena per thread, 16 tenants' connections add 15 %
    to an executor's memory instead of 8 to 11 % (`bench adapters`)."""
    with suppress(AttributeError, OSError):  # another C library
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 2)


def allow_descriptors(config: ProviderConfig) -> None:
    """Raise the limit of file descriptors, so that it covers every permitted connection and its pipe to an executor in
    another process, which has two, whatever others do who have not authenticated."""
    limits = config.limits
    wanted = 3 * limits.max_connections + MAX_HANDSHAKES + _SPARE_DESCRIPTORS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    if hard != resource.RLIM_INFINITY and hard < wanted:
        raise ConfigError(
            f"max_connections = {limits.max_connections} needs {wanted} open files and the system allows {hard}: lower "
            f"it, or raise the limit (ulimit -n)"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
