"""A tenant process that requests one product after the other, for `bench ranks`."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch

from symbiosis_priv.arithmetic.ring import FORWARD
from symbiosis_priv.certificates.reading import Identity
from symbiosis_priv.checkpoints.weights import WeightStore
from symbiosis_priv.federation import load_federation
from symbiosis_priv.limits import GroupIndex
from tenant.core.blame import DEFAULT_COLUMNS
from tenant.preparation.keys import prepare
from tenant.session.options import SessionOptions
from tenant.session.session import Session
from threat_model.availability.options import Sharding

PATIENCE_S = 120.0
_GROUP = GroupIndex(0)  # the group of q, k and v
_LARGEST = 100  # largest entry of a row, so that the exact product is in the range


class TimedAnswer(NamedTuple):
    """The times of one answer by `time.monotonic`, a clock that all processes of a machine share."""

    asked: float
    answered: float
    right: bool


@contextmanager
def serve_requests(
    path: Path, model: Path, cache: Path, identity: Identity, options: Sharding
) -> Iterator[Callable[[None], list[TimedAnswer]]]:
    """The work of a `Child`: sends requests until the parent's first question. Its reply has the times of all answers.

    Args:
        options: masking, rows of each request, and the pause between two of them.
    """
    torch.set_num_threads(1)
    federation = replace(load_federation(path), tenant_certificate=identity.certificate, tenant_key=identity.key)
    store = WeightStore(model, cache=cache)
    preparation = prepare(store, digest=federation.model_digest, columns=DEFAULT_COLUMNS, cache=cache)
    inputs, _ = preparation.facts[_GROUP].entry.columns(FORWARD)
    rows = torch.randint(-_LARGEST, _LARGEST + 1, (options.rows, inputs), dtype=torch.int32, device="cpu")
    expected = store.matrix(_GROUP).product(rows)
    session_options = SessionOptions(masking=options.masking, deadline_s=PATIENCE_S)
    stopped = threading.Event()

    def ask_repeatedly(session: Session) -> list[TimedAnswer]:
        answers = []
        while not stopped.is_set():
            asked = time.monotonic()
            product = session.product(_GROUP, FORWARD, rows)
            answers.append(TimedAnswer(asked, time.monotonic(), torch.equal(product, expected)))
            if options.pause_s:
                stopped.wait(options.pause_s)
        return answers

    with (
        contextlib.closing(Session(federation, preparation, options=session_options, store=store)) as session,
        ThreadPoolExecutor(1) as thread,
    ):
        session.product(_GROUP, FORWARD, rows)
        running = thread.submit(ask_repeatedly, session)

        def stop(_: None) -> list[TimedAnswer]:
            stopped.set()
            return running.result()

        try:
            yield stop
        finally:
            stopped.set()
