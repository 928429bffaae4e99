"""A whole provider: model, executor and gateway, from start to a graceful stop."""

from __future__ import annotations

import json
import os
import signal
import threading
from pathlib import Path
from types import TracebackType
from typing import Self

from symbiosis_priv.tls import server_context
from symbiosis_priv.weights import Progress, write_atomically

from . import logs, supervisor
from .config import ProviderConfig
from .gateway import Gateway
from .model import open_store

log = logs.EventLog(__name__)


class Provider:
    """A provider in this process (its executor may be a child's).

        with Provider(config) as provider:
            connect_to(provider.address)

    Args:
        config: from `config.load`, or built in code.
        progress: told about the first quantisation of a checkpoint.
    """

    def __init__(self, config: ProviderConfig, *, progress: Progress | None = None) -> None:
        self.config = config
        self._progress = progress
        self._gateway: Gateway | None = None

    @property
    def address(self) -> str:
        """`host:port` as bound."""
        assert self._gateway is not None, "start it first"
        return self._gateway.address

    def start(self) -> Self:
        """Quantise if need be, start the executor, listen.

        Raises:
            ConfigError: the address is taken or the executor does not start.
            CertificateError, CheckpointError, UnsupportedModelError: as they say.
        """
        config = self.config
        context = server_context(
            certificate=config.tls.certificate,
            key=config.tls.key,
            tenant_authority=config.tls.tenant_authority,
        )
        manifest = open_store(config).manifest(progress=self._progress)
        self.model_digest = manifest.digest
        self.executor = supervisor.make(config)
        try:
            self.executor.start()
            gateway = Gateway(config, manifest=manifest, context=context, executor=self.executor)
        except BaseException:
            self.executor.stop(config.limits.stop_timeout_s)
            self.executor.context.term()
            raise
        gateway.start()
        self._gateway = gateway
        log.info("started", provider=config.name, address=gateway.address, groups=len(manifest.groups))
        return self

    def stop(self) -> None:
        """Accept no more, answer what is in flight, close. Returns within twice `limits.stop_timeout_s`."""
        if self._gateway is None:
            return
        timeout = self.config.limits.stop_timeout_s
        clean = self._gateway.stop(timeout)
        self.executor.stop(timeout)
        if clean:  # else a socket is still open somewhere, and `term` would wait for it
            self.executor.context.term()
        self._gateway = None
        log.info("stopped", provider=self.config.name, clean=clean)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def serve(
    config: ProviderConfig,
    *,
    ready_file: Path | None = None,
    lifeline: bool = False,
    progress: Progress | None = None,
) -> None:
    """Run a provider until SIGTERM or SIGINT, or, with a lifeline, until stdin closes: then it ends with its parent.

    When it is ready, one line of JSON goes to stdout (logs go to stderr) and the bound address to `ready_file`.
    """
    logs.setup(config.log_level)
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    with Provider(config, progress=progress) as provider:
        if ready_file is not None:
            write_atomically(ready_file, provider.address.encode())
        ready = {"event": "listening", "address": provider.address, "model_digest": provider.model_digest}
        print(json.dumps(ready), flush=True)
        if lifeline:
            threading.Thread(target=_wait_for_eof, args=(stop,), name="lifeline", daemon=True).start()
        stop.wait()


def _wait_for_eof(stop: threading.Event) -> None:
    while os.read(0, 4096):  # unbuffered: a thread inside sys.stdin would hold its lock when the process ends
        pass
    stop.set()
