"""What all engines share: a queue in which clients take turns, the thread that computes, and the costs of requests."""

import logging
import threading
from abc import ABC, abstractmethod
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Ordered
from typing import Any

from transformers import PreTrainedTokenizerBase

from symbiosis_priv.errors import DeadlineExceededError, OverloadedError, SymbiosisError, TaskError
from tenant.endpoint.engine.requests import EngineRequest, Load, Sink
from tenant.endpoint.engine.sequence import Sequence
from tenant.model.ledger import ledger_of, since
from tenant.session.tally import Ledger
from tenant.tasks import Tasks
from tenant.training.corpus import check_context

log = logging.getLogger(__name__)

_STOP_S = 60.0  # seconds for the step in progress when the engine closes
_STEP_S = 0.5  # ... before it is interrupted; steps that wait for no provider take less
_TURN_S = 600.0  # seconds to wait for a step of another engine


class Turns:
    """A queue of requests. Clients take equal turns; within a client's turns, its adapters take turns."""

    def __init__(self, waiting: Iterable[Sequence] = ()) -> None:
        self._clients: OrderedDict[str, OrderedDict[str | None, deque[Sequence]]] = OrderedDict()
        for one in waiting:
            self.add(one)

    def __len__(self) -> int:
        return sum(map(self.count, self._clients))

    def __iter__(self) -> Iterator[Sequence]:
        return (one for adapters in self._clients.values() for queue in adapters.values() for one in queue)

    def count(self, client: str) -> int:
        """Return the number of requests of one client."""
        return sum(map(len, self._clients.get(client, {}).values()))

    def add(self, one: Sequence) -> None:
        """Add a request at the end of the queue of its client and adapter."""
        adapters = self._clients.setdefault(one.request.client, OrderedDict())
        adapters.setdefault(one.request.adapter, deque()).append(one)

    def first(self) -> Sequence | None:
        """Return the next request in turn; None if there is none."""
        return next(self.firsts(), None)

    def firsts(self) -> Iterator[Sequence]:
        """Return the first request of each client, in the order of their turns."""
        return (next(iter(adapters.values()))[0] for adapters in self._clients.values())

    def remove(self, one: Sequence) -> None:
        """Remove a request. Its client and its adapter go to the end of the order of turns."""
        request = one.request
        adapters = self._clients.pop(request.client)
        queue = adapters.pop(request.adapter)
        queue.remove(one)
        if queue:
            adapters[request.adapter] = queue
        if adapters:
            self._clients[request.client] = adapters


class Turn:
    """Context manager: the use of a model, which several engines get in the order in which they ask. Raises
    `DeadlineExceededError` if the turn does not come. `counted`: the session's counters at the last charge."""

    def __init__(self) -> None:
        self.counted = Ledger()
        self._changed = threading.Condition()
        self._asked = deque[int]()  # the engines' threads

    def __enter__(self) -> None:
        own = threading.get_ident()
        with self._changed:
            self._asked.append(own)
            if not self._changed.wait_for(lambda: self._asked[0] == own, timeout=_TURN_S):
                self._asked.remove(own)
                raise DeadlineExceededError(f"another engine of this model has computed one step for {_TURN_S:g} s")

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._asked.popleft()
            self._changed.notify_all()


class Engine(ABC):
    """Generates answers, in a thread that computes the requests of a queue. Its public methods may be called from any
    thread. `max_waiting`: limit of requests that wait. A client may have at most as many of them as stay free.
    `context`: largest number of tokens of a request. `turn`: shared with other engines of the model."""

    def __init__(
        self,
        model: Any,
        tokenizer: PreTrainedTokenizerBase,
        *,
        tasks: Tasks | None,
        max_waiting: int,
        context: int,
        turn: Turn | None = None,
    ) -> None:
        self.context = context
        self._model, self._tasks = model, tasks
        self._tokenizer, self._max_waiting = tokenizer, max_waiting
        self._waiting, self._running = Turns(), Turns()
        self._steps = 0
        self._turn = turn or Turn()
        self._turn.counted = self._counters()
        self._closed = False
        self._idles = False  # True if steps are also computed while there is no request
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="endpoint-engine", daemon=True)
        self._thread.start()

    def check(self, request: EngineRequest) -> None:
        """Refuse a request that cannot be served. Raises `TaskError` or `ConfigError`."""
        if request.adapter is not None and request.adapter not in (self._tasks or ()):
            raise TaskError(f"there is no adapter {request.adapter[:80]!a}; register it first")
        prompt = len(request.prompt)
        check_context(self.context, prompt=prompt, new=request.full_length - prompt)

    @abstractmethod
    def step(self) -> None:
        """Compute something for the requests, in the engine's thread."""

    def submit(self, request: EngineRequest, sink: Sink) -> Sequence:
        """Accept a request. Its events are sent to `sink`; the last is `Done` or `Failed`. Raises `TaskError`: there is
        no such adapter; `ConfigError`: the request cannot be served: it is longer than the model's context or than the
        memory limit; `OverloadedError`: too many requests are waiting; try again later."""
        self.check(request)
        sequence = Sequence(request, sink, self._tokenizer, withdraw=self._withdraw)
        with self._changed:
            if self._closed:
                raise OverloadedError("the endpoint is stopping")
            if self._waiting.count(request.client) >= self._max_waiting - len(self._waiting):
                raise OverloadedError(f"{len(self._waiting)} requests are waiting; try again later")
            self._waiting.add(sequence)
            self._changed.notify_all()
        return sequence

    def load(self) -> Load:
        """Return the present load."""
        with self._changed:
            return Load(running=len(self._running), waiting=len(self._waiting), steps=self._steps)

    def close(self, *, interrupt: Callable[[], None] | None = None) -> None:
        """Refuse new requests, cancel the others, and stop. `interrupt`: ends a step that waits for a provider, such as
        `Session.close`."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            for sequence in (*self._waiting, *self._running):
                sequence.stopping = True
                sequence.cancel()
        if interrupt is not None:
            self._thread.join(_STEP_S)
            if self._thread.is_alive():
                interrupt()
        self._thread.join(_STOP_S)

    def charge(self, sequences: Ordered[Sequence], rows: Ordered[int]) -> None:
        """Divide what the session has spent since the last charge among sequences by their rows, without remainder.
        Each round trip carries rows of all sequences."""
        before, self._turn.counted = self._turn.counted, self._counters()
        spent = since(before, self._turn.counted)
        amounts = {
            "rows": spent.rows,
            "answers_verified": spent.answers_verified,
            "answers_rejected": spent.answers_rejected,
            "bytes_up": spent.bytes_to_executors + spent.bytes_to_helpers,
            "bytes_down": spent.bytes_from_executors + spent.bytes_from_helpers,
        }
        done, every = 0, sum(rows)
        for sequence, own in zip(sequences, rows, strict=True):
            part = {name: n * (done + own) // every - n * done // every for name, n in amounts.items()}
            sequence.charge(**part, round_trips=spent.executor_round_trips)
            done += own

    def end(self, sequence: Sequence, error: Exception | None = None) -> None:
        """Free the resources of a request, and report its last event. Messages of other libraries may quote the prompt,
        so only the type of their errors is reported."""
        with self._changed:
            found = [turns for turns in (self._waiting, self._running) if sequence in turns]
            for turns in found:
                turns.remove(sequence)
        sequence.kv = None
        sequence.held.close()
        if not found:
            return  # it was cancelled while it waited, and its end was reported
        if error is None:
            sequence.done()
        elif isinstance(error, SymbiosisError):
            sequence.fail(error)
        else:
            log.error("request %s failed: %s", sequence.request.id, type(error).__name__)
            sequence.fail(SymbiosisError(f"the model failed on this request ({type(error).__name__})"))

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._closed or self._waiting or self._running or self._idles)
                if self._is_done():
                    return
            try:
                with self._turn:
                    self.step()
            except DeadlineExceededError as error:
                with self._changed:
                    late = [*self._waiting, *self._running]
                for sequence in late:
                    self.end(sequence, error)

    def _is_done(self) -> bool:
        """True if the engine is closed, and no request is left."""
        return self._closed and not self._waiting and not self._running

    def _withdraw(self, sequence: Sequence) -> None:
        """Take a cancelled request out of the queue, and report its end in the caller's thread. One that runs ends at
        its next token."""
        with self._changed:
            if sequence not in self._waiting:
                return
            self._waiting.remove(sequence)
        sequence.done()

    def _counters(self) -> Ledger:
        """Return the counters of the model's session; zeros without one."""
        try:
            return ledger_of(self._model) or Ledger()
        except SymbiosisError:  # a model that is not split
            return Ledger()
