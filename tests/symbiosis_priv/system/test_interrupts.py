"""Signals as exceptions, and the places where they may arrive."""

import contextlib
import os
import signal
import threading

import pytest

from symbiosis_priv.system.interrupts import Interrupts, importing

pytestmark = pytest.mark.usefixtures("python_interrupts")


def send(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)


@pytest.mark.parametrize(
    ("number", "kind", "status"), [(signal.SIGINT, KeyboardInterrupt, None), (signal.SIGTERM, SystemExit, 143)]
)
def test_a_signal_becomes_an_exception(number: signal.Signals, kind: type[BaseException], status: int | None) -> None:
    with pytest.raises(kind) as raised, Interrupts():
        send(number)
    assert getattr(raised.value, "code", None) == status


@pytest.mark.parametrize(
    ("signals", "permitted", "done", "kind"),
    [
        ([signal.SIGINT], False, ["optimizer"], KeyboardInterrupt),  # the whole block is completed first
        ([signal.SIGTERM], True, ["optimizer"], SystemExit),  # at the next permitted place
        ([signal.SIGTERM, signal.SIGINT], False, [], KeyboardInterrupt),  # the second signal is not delayed
    ],
)
def test_a_signal_is_delayed_in_a_whole_block(
    signals: list[signal.Signals], permitted: bool, done: list[str], kind: type[BaseException]
) -> None:
    steps = []

    def run() -> None:
        with Interrupts() as interrupts, interrupts.whole():
            for number in signals:
                send(number)
            steps.append("optimizer")
            if permitted:
                with interrupts.anywhere():
                    steps.append("never")

    with pytest.raises(kind):
        run()
    assert steps == done


def test_a_signal_may_arrive_in_an_anywhere_block() -> None:
    with pytest.raises(KeyboardInterrupt), Interrupts() as interrupts, interrupts.whole(), interrupts.anywhere():
        send(signal.SIGINT)


def test_handlers_are_restored_and_ignored_signals_stay_ignored() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    before = signal.getsignal(signal.SIGTERM)
    with Interrupts():
        assert signal.getsignal(signal.SIGTERM) != before
        send(signal.SIGINT)
    assert signal.getsignal(signal.SIGTERM) == before
    assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN


def test_other_threads_may_use_it() -> None:
    failures: list[BaseException] = []

    def work() -> None:
        try:
            with Interrupts() as interrupts, interrupts.whole():
                pass
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert not failures


def test_a_signal_during_an_import_arrives_when_it_has_ended() -> None:
    before, imported = signal.getsignal(signal.SIGINT), list[str]()

    def load() -> None:
        with importing(), contextlib.suppress(BaseException):  # as torch imports numpy
            send(signal.SIGINT)
            imported.append("all of it")

    with pytest.raises(KeyboardInterrupt):
        load()
    assert imported
    assert signal.getsignal(signal.SIGINT) is before


def test_an_import_that_fails_over_a_second_signal_ends_as_the_first_one_does() -> None:
    def load(*numbers: signal.Signals) -> None:
        with importing():
            for number in numbers:
                with contextlib.suppress(BaseException):
                    send(number)
            raise ImportError("cannot load module more than once per process")

    with pytest.raises(KeyboardInterrupt):
        load(signal.SIGINT, signal.SIGINT)
    with pytest.raises(SystemExit, match="143"):
        load(signal.SIGTERM, signal.SIGTERM)
    with pytest.raises(ImportError):
        load()
