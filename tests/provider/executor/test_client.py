"""The guard of an executor, for every kind of executor."""

import errno

import msgspec
import zmq

from provider.executor.client import ExecutorHandle
from provider.executor.queues import ExecutorAnswer, ExecutorReport, InboxMessage, LocalInbox, RequestPipe
from tests.provider.conftest import Configure
from tests.waiting import until


class _OutOfReach(ExecutorHandle):
    """A working executor on a machine that has no free descriptor at the guard's first request."""

    asked = 0

    def start(self) -> None:
        self._inbox = LocalInbox()
        self._inbox.set_inline_handler(self._answer)
        self._guard.start()

    def stop(self, timeout: float) -> None:
        self.stopping.set()
        self._guard.close(timeout)
        self._inbox.close()

    def open_pipe(self) -> RequestPipe:
        self.asked += 1
        if self.asked == 1:
            raise zmq.ZMQError(errno.EMFILE)
        return self._inbox.open_pipe()

    def _on_hang(self) -> None:
        raise AssertionError("it does not hang")

    def _answer(self, message: InboxMessage) -> bool:
        report = ExecutorReport(first_group=0, groups=1, rows_by_group=[0])
        self._inbox.answer([(message.sender, ExecutorAnswer(b"", memoryview(msgspec.json.encode(report)), 0))])
        return True


def test_the_guard_retries_after_a_request_that_could_not_be_sent(configure: Configure) -> None:
    executor = _OutOfReach(configure(), model_digest="")
    executor.start()
    until(lambda: executor.present)
    executor.stop(5.0)
    assert not executor.hangs
