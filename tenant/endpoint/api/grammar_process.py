"""The processes that compile and follow grammars: `python -m tenant.endpoint.api.grammar_process`.

Clients write grammars, and a short one can keep the library busy for hours or fill the memory. So the library runs only
here, and the kernel ends what takes too long. The first process reads the tokenizer from stdin, a Unix socket, and
forks one process per grammar, which needs no start of its own. Each fork gets a socket for frames, and the first
process gets the read end of a pipe: the fork ends when the other end of the pipe closes, and all processes end when
stdin closes.

A frame has a kind, the number of an answer, and a body:

grammar   to the fork: llguidance's variant of Lark. Replies: `mask` for the first token, or `error`
token     to the fork: the answer's next token. Replies: `accepted` (1: only an end token may follow), then `mask`
forget    to the fork: the answer has ended. No reply
"""

import contextlib
import gc
import json
import os
import resource
import select
import signal
import socket
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

GRAMMAR, TOKEN, FORGET, MASK, ACCEPTED, ERROR = (bytes([kind]) for kind in range(6))
_HEAD = struct.Struct("<cII")

_COMPILE_S = 2.0  # of CPU time; usual schemas take 2 ms
_TOKEN_S = 0.005  # of CPU time per token of an answer; usual schemas take 0.1 ms
_SAVED_S = 0.25  # the unused time that an answer may keep for later tokens
_MEMORY = 256 << 20  # bytes of address space, besides the tokenizer
_LIMITS = LLParserLimits(verbose_errors=False)  # errors must not quote text


def send(to: socket.socket, kind: bytes, answer: int, body: bytes = b"") -> None:
    to.sendall(_HEAD.pack(kind, answer, len(body)) + body)


def receive(source: BinaryIO) -> tuple[bytes, int, bytes]:
    """Return the next frame. Raises `EOFError` if the other side has ended."""
    head = source.read(_HEAD.size)
    if len(head) < _HEAD.size:
        raise EOFError
    kind, answer, size = _HEAD.unpack(head)
    body = source.read(size)
    if len(body) < size:
        raise EOFError
    return kind, answer, body


def main() -> None:
    """Fork a process for each grammar that stdin announces."""
    with contextlib.suppress(OSError):  # Linux ends these processes first when memory runs out
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a core file would have schemas
    control = socket.socket(fileno=0)
    (size,) = struct.unpack("<I", control.recv(4, socket.MSG_WAITALL))
    given = json.loads(control.recv(size, socket.MSG_WAITALL))
    tokens = LLTokenizer(given["tokenizer"], n_vocab=given["size"], eos_token=given["ends"] or None)
    gc.freeze()  # a collection in a fork would copy all pages
    poll = select.poll()
    poll.register(control, select.POLLIN)
    forks: dict[int, int] = {}  # process ids by their pipes
    while True:
        for ready, _ in poll.poll():
            if ready != control.fileno():
                poll.unregister(ready)
                os.close(ready)
                os.kill(forks[ready], signal.SIGKILL)
                os.waitpid(forks.pop(ready), 0)
                continue
            _, received, *_ = socket.recv_fds(control, 1, 2)
            if not received:
                os.killpg(0, signal.SIGKILL)
            channel, pipe = received
            if not (fork := os.fork()):
                _follow(tokens, channel)
            os.close(channel)
            forks[pipe] = fork
            poll.register(pipe, 0)  # reports only that the other end has closed


def _follow(tokens: LLTokenizer, channel: int) -> None:
    """Compile one grammar, and follow its answers until the socket closes."""
    try:
        with contextlib.suppress(OSError, ValueError):
            used = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (used + _MEMORY, used + _MEMORY))
        to = socket.socket(fileno=channel)
        source = to.makefile("rb")
        _, _, rules = receive(source)
        with _limited(_COMPILE_S):
            begin = LLMatcher(tokens, LLMatcher.grammar_from_lark(rules.decode()), log_level=0, limits=_LIMITS)
            _send_mask(to, 0, begin)
        answers: dict[int, tuple[LLMatcher, float]] = {}
        while True:
            kind, answer, body = receive(source)
            if kind == FORGET:
                answers.pop(answer, None)
                continue
            matcher, left = answers.get(answer) or (begin.deep_copy(), _SAVED_S)
            begun = time.process_time()
            with _limited(left):
                matcher.consume_token(int.from_bytes(body, "little"))
                if not matcher.is_error():
                    send(to, ACCEPTED, answer, bytes([matcher.is_stopped()]))
                _send_mask(to, answer, matcher)
            if (unused := left - (time.process_time() - begun)) < 0:  # the kernel looks at its ticks only
                return
            answers[answer] = matcher, min(_SAVED_S, unused + _TOKEN_S)
    finally:
        os._exit(0)


@contextlib.contextmanager
def _limited(seconds: float) -> Iterator[None]:
    """Context manager: the kernel ends this process (SIGPROF) after this CPU time."""
    signal.setitimer(signal.ITIMER_PROF, seconds)
    yield
    signal.setitimer(signal.ITIMER_PROF, 0)


def _send_mask(to: socket.socket, answer: int, matcher: LLMatcher) -> None:
    mask = b"" if matcher.is_error() else matcher.compute_bitmask()
    if matcher.is_error():
        send(to, ERROR, answer, matcher.get_error().partition("\n")[0][:200].encode())
    else:
        send(to, MASK, answer, mask)


if __name__ == "__main__":
    main()
