"""A worker runs its jobs in order, and never outlives its owner."""

import threading

import pytest

from symbiosis_priv.errors import SymbiosisError
from tenant.worker import Worker

TIMEOUT_S = 20.0


def test_jobs_run_in_order_and_return_results_and_errors() -> None:
    worker, done = Worker("test"), list[int]()
    futures = [worker.submit(done.append, number) for number in range(100)]
    failing = worker.submit(int, "no number")
    assert [future.result(TIMEOUT_S) for future in futures] == [None] * 100
    assert done == list(range(100))
    with pytest.raises(ValueError, match="no number"):
        failing.result(TIMEOUT_S)
    worker.stop()
    assert worker.join(TIMEOUT_S)


def test_queued_jobs_fail_when_the_worker_is_stopped() -> None:
    worker, begun, go_on = Worker("test"), threading.Event(), threading.Event()

    def work() -> str:
        begun.set()
        go_on.wait(TIMEOUT_S)
        return "done"

    first, waiting = worker.submit(work), worker.submit(work)
    assert begun.wait(TIMEOUT_S)
    worker.stop()
    assert not worker.join(0)
    go_on.set()
    assert first.result(TIMEOUT_S) == "done"
    for refused in (waiting, worker.submit(work)):
        with pytest.raises(SymbiosisError, match="closed"):
            refused.result(TIMEOUT_S)
    assert worker.join(TIMEOUT_S)
