"""Loads a model and its adapters, and serves them."""

import gc
import socket
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import tenant.tasks.methods  # noqa: F401 - an adapter may be of one of its methods
from symbiosis_priv.checkpoints.checkpoint import resolve
from symbiosis_priv.checkpoints.discovery.skeleton import architecture, load_config
from tenant.endpoint.api.application import create_app
from tenant.endpoint.api.http_server import Server
from tenant.endpoint.api.service import Service, Settings
from tenant.endpoint.engine.classifying import ClassifyingEngine
from tenant.endpoint.engine.continuous import ContinuousEngine, EngineLimits
from tenant.endpoint.engine.queued import Engine, Turn
from tenant.endpoint.engine.requests import AHEAD
from tenant.endpoint.engine.single_model import open_packed
from tenant.endpoint.options import Serving
from tenant.endpoint.page.router import FILES, page_router
from tenant.masking.registry import scheme_named
from tenant.model.hf import RemoteConfig, backend_of
from tenant.model.ledger import ledger_of, session_of
from tenant.model.loading import (
    is_classifier,
    load_classifier,
    load_language_model,
    load_tokenizer,
    warn_of_other_template,
)
from tenant.tasks import Tasks
from tenant.tasks.registry import DEFAULT_MEMORY

_TRAINING_MEMORY = 8 << 30  # bytes of adapters, of which training clients take four times their parameters


@contextmanager
def opened(
    model: str | Path,
    remote: RemoteConfig,
    *,
    name: str,
    adapters: Mapping[str, Path],
    options: Serving,
    clients: int = 1,
) -> Iterator[Service]:
    """Context manager: a split model with an engine. Each adapter is loaded once to check that it fits the model.
    Raises `SymbiosisError`: the model or an adapter cannot be loaded."""
    classifies = is_classifier(architecture(load_config(resolve(model))))
    if classifies:
        options.check_for_classifier()
    tokenizer = load_tokenizer(model)
    if classifies:
        loaded = load_classifier(model, remote=remote, tokenizer=tokenizer)
    else:
        loaded = load_language_model(model, remote=remote, tokenizer=tokenizer)
    with ExitStack() as running:
        backend = running.enter_context(backend_of(loaded))
        tasks = Tasks(loaded, memory_limit=DEFAULT_MEMORY if options.tinker is None else _TRAINING_MEMORY)
        for task, folder in adapters.items():
            tasks.register(task, folder)
            warn_of_other_template(folder, tokenizer)
            tasks.load(task)
        ahead = AHEAD if options.draft is not None else 0
        limits = EngineLimits(memory=options.memory_mib << 20, clients=clients)
        if options.pace_ms is not None:
            limits = replace(limits, step_rows=options.answer_bucket, pace_s=options.pace_ms / 1000)
        turn = Turn()
        engine: Engine = (
            ClassifyingEngine(loaded, tokenizer, tasks=tasks)
            if classifies
            else ContinuousEngine(open_packed(loaded, tasks), tokenizer, limits=limits, ahead=ahead, turn=turn)
        )
        running.callback(engine.close, interrupt=backend.close)
        service = Service(
            engine,
            loaded,
            tokenizer,
            name=name,
            tasks=tasks,
            pooling=options.pooling,
            answer_bucket=options.answer_bucket,
            session=session_of(loaded),
        )
        running.callback(service.vocabulary.close)
        if options.tinker is not None:
            from tenant.endpoint.tinker.routes import opened as tinker_opened

            service.routers.append(
                running.enter_context(tinker_opened(service, tasks, backend, turn, options=options, clients=clients))
            )
        gc.freeze()  # a collection that examines torch's and transformers' modules stops all answers
        running.callback(gc.unfreeze)
        yield service


def server(
    service: Service, listener: socket.socket, *, keys: tuple[str, ...], masking: str, options: Serving
) -> Server:
    """Return a server with the API, and the page if the model generates. `masking`: the scheme's name, for the page."""
    settings = Settings(
        keys=keys,
        hosts=frozenset({"localhost", *(host.lower() for host in options.host)}),
        drain_s=options.drain_s,
        open_paths=frozenset({"/health", "/ready", *FILES}),
        signed=() if options.tinker is None else ("/tinker-files/",),
    )
    routers = service.routers
    if not service.labels:
        shown = scheme_named(masking)
        page = page_router(shown, lambda: ledger_of(service.model), model=service.root)
        routers = [page, *routers]
    return Server(create_app(service, settings, routers=routers), listener, drain_s=options.drain_s)
