"""Tenants that ask for one product after the other, each in a process with a session of its own, for `bench ranks`.

Their process imports no more than a session needs: what is measured has begun when the last of them has.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import NamedTuple

import torch

from symbiosis_priv.arithmetic.ring import FORWARD
from symbiosis_priv.certificates import Identity, Kind, issue
from symbiosis_priv.checkpoints.weights import WeightStore
from symbiosis_priv.errors import DeadlineExceededError, ProtocolError, SymbiosisError
from symbiosis_priv.federation import load_federation
from symbiosis_priv.harness.local import LocalFederation
from tenant.core.verifier import DEFAULT_COLUMNS
from tenant.preparation.keys import prepare
from tenant.session.options import SessionOptions
from tenant.session.session import Session

_GROUP = 0  # q, k and v
_LARGEST = 100  # of a row's entries: the true product is in the range
_PATIENCE_S = 120.0


@dataclass(frozen=True, kw_only=True)
class _Tenant:
    """Who asks, for what.

    Args:
        federation, model, cache: where things are.
        identity: the tenant's own.
        masking: the scheme.
        rows: of each product.
        pause_s: between two of them.
    """

    federation: Path
    model: Path
    cache: Path
    identity: Identity
    masking: str
    rows: int
    pause_s: float


class Answer(NamedTuple):
    """Times by `time.monotonic`, which all processes of a machine share."""

    asked: float
    answered: float
    right: bool


@contextmanager
def asking(
    local: LocalFederation, *, tenants: int, rows: int, masking: str, pause_s: float = 0.0
) -> Iterator[Callable[[], list[Answer]]]:
    """Tenants that ask until the call that collects what they got."""
    keys = local.directory / "keys"
    authority = Identity(certificate=keys / "authority.pem", key=keys / "authority.key")
    context = multiprocessing.get_context("spawn")
    running: list[tuple[BaseProcess, Connection]] = []

    def collect() -> list[Answer]:
        for _, pipe in running:
            pipe.send(None)
        return [answer for _, pipe in running for answer in _received(pipe)]

    try:
        for number in range(tenants):
            identity = issue(keys, authority=authority, kind=Kind.TENANT, name=f"tenant-{number}")
            tenant = _Tenant(
                federation=local.federation,
                model=local.model,
                cache=local.cache,
                identity=identity,
                masking=masking,
                rows=rows,
                pause_s=pause_s,
            )
            here, there = context.Pipe()
            process: BaseProcess = context.Process(target=_run, args=(tenant, there), daemon=True)
            process.start()
            there.close()
            running.append((process, here))
        for _, pipe in running:
            _received(pipe)
        yield collect
    finally:
        for process, pipe in running:
            process.kill()
            process.join()
            pipe.close()


def _received(pipe: Connection) -> list[Answer]:
    try:
        if not pipe.poll(_PATIENCE_S):
            raise DeadlineExceededError(f"a tenant has said nothing for {_PATIENCE_S:g} s")
        found: list[Answer] | str = pipe.recv()
    except EOFError as error:
        raise ProtocolError("a tenant has ended; its reason is above") from error
    if isinstance(found, str):
        raise ProtocolError(f"a tenant could not go on: {found}")
    return found


def _run(tenant: _Tenant, pipe: Connection) -> None:
    """Says that it has begun, asks until it is told to stop, and says what it got, or what went wrong."""
    torch.set_num_threads(1)
    try:
        _ask(tenant, pipe)
    except SymbiosisError as error:
        pipe.send(f"{type(error).__name__}: {error}")


def _ask(tenant: _Tenant, pipe: Connection) -> None:
    federation = replace(
        load_federation(tenant.federation),
        tenant_certificate=tenant.identity.certificate,
        tenant_key=tenant.identity.key,
    )
    store = WeightStore(tenant.model, cache=tenant.cache)
    preparation = prepare(store, digest=federation.model_digest, columns=DEFAULT_COLUMNS, cache=tenant.cache)
    inputs, _ = preparation.facts[_GROUP].entry.columns(FORWARD)
    rows = torch.randint(-_LARGEST, _LARGEST + 1, (tenant.rows, inputs), dtype=torch.int32, device="cpu")
    expected = store.matrix(_GROUP).product(rows)
    options = SessionOptions(masking=tenant.masking, deadline_s=_PATIENCE_S)
    answers: list[Answer] = []
    with contextlib.closing(Session(federation, preparation, options=options, store=store)) as session:
        session.product(_GROUP, FORWARD, rows)
        pipe.send([])
        while not pipe.poll():
            asked = time.monotonic()
            product = session.product(_GROUP, FORWARD, rows)
            answers.append(Answer(asked, time.monotonic(), torch.equal(product, expected)))
            if tenant.pause_s:  # else not even for the moment that a sleep of 0 takes
                time.sleep(tenant.pause_s)
    pipe.send(answers)
