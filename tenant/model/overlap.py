"""Overlaps the parts of a batch: while one part waits for a provider, another part computes.

A pass through a model waits once for each layer group. Two parts of a batch, each in its own thread, use these waits:
one part computes while the other waits for an answer, and products of both are under way at the same time.

Theory of operation. Models are not thread-safe: parts would draw from one random generator, and their gradients would
be summed in any order, with other rounding. So the parts take turns. A part ends its turn in `waiting`, which encloses
every product, and takes the next turn before it continues. Each part has its own random numbers, which are exchanged
with the turn. Each part's gradients are set aside as they arrive, and summed in the order of the parts at the end. So
results and gradients have the same bits as if the parts ran one after the other.

vLLM's dual batch overlap uses the same idea for the communication of experts.
"""

import contextvars
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, wait
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, distributed, nn

from symbiosis_priv.errors import UnsupportedMethodError
from tenant.worker import Worker

P = TypeVar("P")
R = TypeVar("R")

_JOIN_S = 5.0  # time to join threads; a part that waits for a provider ends later


def overlapped(model: nn.Module, work: Callable[[P], R], parts: Sequence[P]) -> list[R]:
    """Call `work` for all parts of a batch at the same time (see the module's docstring). Returns the results in order.

        def step(part):
            loss = model(**part).loss / 2
            loss.backward()
            return loss.detach()

        losses = overlapped(model, step, [first_half, second_half])
        halves = overlapped(model, model.generate, input_ids.chunk(2))

    Gradients and results have the same bits as in a loop over the parts. If the model draws random numbers (dropout,
    sampling), they differ from the loop's: each part has its own generator, seeded from torch's. Providers see the same
    requests as from the loop, in another order.

    Args:
        model: the model that `work` runs, split by `RemoteConfig`.
        work: runs the model on one part. It may call `backward`, and must change neither the model nor other state that
            parts share. Its threads have the caller's context variables and modes of autograd and autocast.

    Raises:
        UnsupportedMethodError: several processes sum their gradients during the backward pass, or prompt learning
            changes the model while it generates.
        BaseException: the first error of a part. Gradients are then as they were before.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad and torch.is_grad_enabled()]
    if trained and distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1:
        raise UnsupportedMethodError(
            "several processes sum their gradients during the backward pass, which parts of a batch cannot share; run "
            "one part after the other"
        )
    if not trained and getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False):
        raise UnsupportedMethodError(
            "prompt learning changes the model while it generates, so parts of a batch cannot generate at the same "
            "time; run one part after the other"
        )
    turns = _Turns({parameter.device for parameter in model.parameters() if parameter.is_cuda})
    seeds = torch.randint(1 << 62, (len(parts),), dtype=torch.int64, device="cpu").tolist()
    takers = [_Part(turns, seed) for seed in seeds]
    random, modes = turns.random_state(), _modes()
    workers = [Worker(f"part-{number}") for number in range(len(parts))]
    try:
        with _gradients(trained, takers):
            try:
                jobs = [
                    worker.submit(contextvars.copy_context().run, taker.run, partial(work, part), modes)
                    for worker, taker, part in zip(workers, takers, parts, strict=True)
                ]
                for job in wait(jobs, return_when=FIRST_EXCEPTION).done:
                    job.result()
            finally:  # take the last turn, also after an error, so that no part computes any more
                with turns.lock:
                    turns.stopped = True
    finally:
        turns.set_random_state(random)
        for worker in workers:
            worker.stop()
        for worker in workers:
            worker.join(_JOIN_S)
    return [job.result() for job in jobs]


class _Waiting:
    """Context manager: end the turn of this thread's part, if there is one, and take the next turn at the end. It is a
    class because a generator takes longer than many steps of a product."""

    def __enter__(self) -> None:
        if (part := _thread_state.part) is not None:
            part.end_turn()

    def __exit__(self, *exception: object) -> None:
        if (part := _thread_state.part) is not None:
            part.take_turn()


waiting = _Waiting()


class _Stopped(BaseException):
    """Ends a part because another part has failed. Not an `Exception`, so that the part's code does not catch it."""


class _Turns:
    """At most one part of a batch has the turn. The generators of `devices` (CUDA) are exchanged with the turn."""

    def __init__(self, devices: set[torch.device]) -> None:
        self.lock = threading.Lock()
        self.stopped = False
        self._devices = sorted(devices, key=str)

    def random_state(self) -> list[Tensor]:
        return [torch.get_rng_state(), *(torch.cuda.get_rng_state(device) for device in self._devices)]

    def set_random_state(self, states: list[Tensor]) -> None:
        """Set the states that `random_state` has returned."""
        torch.set_rng_state(states[0])
        for device, state in zip(self._devices, states[1:], strict=True):
            torch.cuda.set_rng_state(state, device)


class _Part:
    """One part of a batch, with the parameters and gradients that `backward` has yielded, in order."""

    def __init__(self, turns: _Turns, seed: int) -> None:
        self.gradients: list[tuple[Tensor, Tensor]] = []
        self._turns, self._seed = turns, seed
        self._random: list[Tensor] | None = None

    def run(self, work: Callable[[], R], modes: Callable[[], ExitStack]) -> R:
        _thread_state.part = self
        self.take_turn()
        try:
            with modes():
                return work()
        finally:
            if not self._turns.stopped:  # a stopped part has no turn
                self.end_turn()

    def take_turn(self) -> None:
        self._turns.lock.acquire()
        if self._turns.stopped:
            self._turns.lock.release()
            raise _Stopped
        if self._random is None:
            torch.manual_seed(self._seed)
        else:
            self._turns.set_random_state(self._random)

    def end_turn(self) -> None:
        self._random = self._turns.random_state()
        self._turns.lock.release()


class _ThreadState(threading.local):
    part: _Part | None = None


_thread_state = _ThreadState()


@contextmanager
def _gradients(trained: Sequence[nn.Parameter], parts: Sequence[_Part]) -> Iterator[None]:
    """Context manager: set the gradients of each part aside, and add them in the order of the parts at the end."""

    def set_aside(parameter: Tensor) -> None:
        part, gradient = _thread_state.part, parameter.grad
        assert part is not None
        assert gradient is not None
        part.gradients.append((parameter, gradient))
        parameter.grad = None

    before = [parameter.grad for parameter in trained]
    hooks = [parameter.register_post_accumulate_grad_hook(set_aside) for parameter in trained]
    for parameter in trained:
        parameter.grad = None
    try:
        yield
    finally:
        for hook, parameter, gradient in zip(hooks, trained, before, strict=True):
            hook.remove()
            parameter.grad = gradient
    for part in parts:
        for owner, gradient in part.gradients:
            owner.grad = gradient if owner.grad is None else owner.grad.add_(gradient)


def _modes() -> Callable[[], ExitStack]:
    """Return a function that enters the caller's modes of torch, which are per thread."""
    grad, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    autocast = [(kind, torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]

    def entered() -> ExitStack:
        stack = ExitStack()
        modes: list[Any] = [torch.inference_mode(inference), torch.set_grad_enabled(grad)]
        modes += [torch.autocast(kind, dtype=dtype) for kind, dtype in autocast]
        modes.append(torch.autograd.set_multithreading_enabled(False))  # CUDA has one backward thread for all parts
        for mode in modes:
            stack.enter_context(mode)
        return stack

    return entered
