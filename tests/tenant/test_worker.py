"""A worker runs its jobs in order, and never outlives its owner."""

import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, Future

import pytest

from symbiosis_priv.errors import SymbiosisError
from tenant.worker import Promise, Worker

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


def test_a_cancelled_job_is_left_out() -> None:
    worker, go_on, done = Worker("test"), threading.Event(), list[str]()
    worker.submit(go_on.wait, TIMEOUT_S)
    assert worker.submit(done.append, "cancelled").cancel()
    last = worker.submit(done.append, "kept")
    go_on.set()
    last.result(TIMEOUT_S)
    assert done == ["kept"]
    worker.stop()
    assert worker.join(TIMEOUT_S)


def test_an_idle_worker_has_no_thread() -> None:
    before = threading.active_count()
    worker = Worker("test")
    assert threading.active_count() == before
    worker.stop()
    assert worker.join(0)


def test_a_promise_behaves_like_a_future() -> None:
    """Before and after the result, for every kind of result, including None."""
    for outcome in (7, None, ValueError("why"), "cancelled"):
        promise, future = Promise[object](), Future[object]()
        told: list[object] = []
        promise.add_done_callback(told.append)
        for one in (promise, future):
            assert not one.done()
            with pytest.raises(TimeoutError):
                one.result(timeout=0)
            if isinstance(outcome, Exception):
                one.set_exception(outcome)
            elif outcome == "cancelled":
                one.cancel()
            else:
                one.set_result(outcome)
        assert promise.done()
        assert told == [promise]
        assert promise.cancelled() == future.cancelled()
        assert _settled(promise.result) == _settled(future.result)
        assert _settled(promise.exception) == _settled(future.exception)


def _settled(ask: Callable[[], object]) -> object:
    try:
        return ask()
    except CancelledError:
        return CancelledError
    except ValueError as error:
        return error
