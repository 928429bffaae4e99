"""The bytes of tokens, and grammars over them, which other processes compile and follow (`grammar_process`)."""

import asyncio
import copy
import itertools
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cached_property
from typing import BinaryIO

import anyio
from llguidance import LLTokenizer
from llguidance.hf import from_tokenizer
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from symbiosis_priv.errors import ConfigError, OverloadedError
from tenant.endpoint.api import grammar_process as process

_SCHEMA_BYTES = 64 << 10
_COMPILE_S = 60.0  # including the start of the first process; `grammar_process` limits the work
_TOKEN_S = 5.0
_COMPILING = 4  # grammars compiled at a time, one of each client
_PLACES = 32  # processes of grammars. A client may have at most as many of them as stay free
_KEPT = 8  # of these, the number of processes that wait for another request with the same grammar
_UNKNOWN = "\ufffd"


class Vocabulary:
    """The tokens of a model, and their grammars. `size`: number of logits. `ends`: tokens that end an answer."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, size: int, ends: Collection[int]) -> None:
        self.size = size
        self._tokenizer = tokenizer
        self._ends = sorted(ends)
        self._starting = threading.Lock()
        self._started: tuple[subprocess.Popen[bytes], socket.socket] | None = None
        self._compiling = asyncio.Semaphore(_COMPILING)
        self._threads = ThreadPoolExecutor(_COMPILING)
        self._turns = defaultdict[str, asyncio.Lock](asyncio.Lock)  # by client
        self._grammars = weakref.WeakValueDictionary[tuple[str, str], CompiledGrammar]()
        self._kept = OrderedDict[tuple[str, str], CompiledGrammar]()

    @cached_property
    def _tokens(self) -> LLTokenizer | None:
        """llguidance's tokenizer, made on first use, which takes a second for a vocabulary of 150,000."""
        if not isinstance(self._tokenizer, PreTrainedTokenizerFast):
            return None
        size = max(self.size, len(self._tokenizer))
        return from_tokenizer(self._tokenizer, n_vocab=size, eos_token=self._ends or None)

    def bytes_of(self, token: int) -> bytes | None:
        """Return the bytes of a token; None if they are unknown."""
        if self._tokens is not None:
            return bytes(self._tokens.decode_bytes([token]))
        text = str(self._tokenizer.decode([token], clean_up_tokenization_spaces=False))
        return None if _UNKNOWN in text else text.encode()

    def text_of(self, token: int) -> str:
        """Return the text of a token; bytes that are not UTF-8 are replaced."""
        return (self.bytes_of(token) or b"\xff").decode(errors="replace")

    async def grammar(self, rules: str, *, client: str) -> "CompiledGrammar":
        """Compile a grammar in llguidance's variant of Lark, such as `start: %json {"type": "object"}`. Requests of a
        client with the same grammar share it. Raises `ConfigError`: a schema is invalid, too large or too complex, or
        cannot be enforced; `OverloadedError`: the client uses too many grammars."""
        key = client, rules
        async with self._turns[client]:
            found = self._grammars.get(key)
            if found is None or found.ended:
                for kept in [kept for kept in self._kept if self._is_full(client) and kept[0] == client]:
                    del self._kept[kept]  # no request uses it
                if self._is_full(client):
                    raise OverloadedError("too many different schemas of this key are in use; try again later")
                async with self._compiling:
                    found = await asyncio.get_running_loop().run_in_executor(self._threads, self.compiling, rules)
                    await found.compiled()
                self._grammars[key] = found
            self._kept[key] = found
            self._kept.move_to_end(key)
            if len(self._kept) > _KEPT:
                self._kept.popitem(last=False)
            return found

    def compiling(self, rules: str) -> "CompiledGrammar":
        """Begin to compile a grammar."""
        if not isinstance(self._tokenizer, PreTrainedTokenizerFast):
            raise ConfigError("this model's tokenizer cannot follow a JSON schema")
        if len(rules) > _SCHEMA_BYTES:
            raise ConfigError(f"the JSON schema has {len(rules):,} bytes; at most {_SCHEMA_BYTES:,} are allowed")
        with self._starting:
            if self._started is None or self._started[0].poll() is not None:
                self.close()
                plain = copy.copy(self._tokenizer.backend_tokenizer)
                plain.no_padding()
                plain.no_truncation()
                size = max(self.size, len(self._tokenizer))
                given = json.dumps({"tokenizer": plain.to_str(), "size": size, "ends": self._ends}).encode()
                control, theirs = socket.socketpair()
                with theirs:
                    started = subprocess.Popen(
                        [sys.executable, "-m", process.__name__],
                        stdin=theirs.fileno(),
                        stdout=subprocess.DEVNULL,
                        stderr=subprocess.DEVNULL,  # errors of the library may quote a schema
                        start_new_session=True,
                    )
                self._end = weakref.finalize(self, _end, started, control)
                control.settimeout(_COMPILE_S)
                with suppress(OSError):  # it has ended, and the grammar will fail
                    control.sendall(struct.pack("<I", len(given)) + given)
                self._started = started, control
            return CompiledGrammar(rules, self._started[1])

    def close(self) -> None:
        """End all processes. The next grammar starts them again."""
        self._kept.clear()
        if self._started is not None:
            self._end()
            self._started = None

    def _is_full(self, client: str) -> bool:
        own = sum(owner == client for owner, _ in self._grammars)
        return own >= _PLACES - len(self._grammars)


class CompiledGrammar:
    """A grammar in a process of its own, which ends with this object. Calling it makes the state of a new answer."""

    def __init__(self, rules: str, control: socket.socket) -> None:
        self._channel, theirs = socket.socketpair()
        read, write = os.pipe()
        self._source = self._channel.makefile("rb")
        self.end = weakref.finalize(self, _close, self._source, self._channel, write)
        try:
            socket.send_fds(control, [b"\0"], [theirs.fileno(), read])
            self._channel.settimeout(_TOKEN_S)
            process.send(self._channel, process.GRAMMAR, 0, rules.encode())
        except OSError as error:
            raise self._failure() from error
        finally:
            theirs.close()
            os.close(read)
        self._numbers = itertools.count(1)
        self._lock = threading.RLock()  # an answer may be forgotten by the garbage collection inside this lock
        self._masks: dict[int, bytes | None] = {0: None}  # of the present answers; None: to be received
        self._errors: dict[int, str] = {}

    @property
    def ended(self) -> bool:
        """True if the process has ended."""
        return not self.end.alive

    async def compiled(self) -> None:
        """Wait for the end of the compilation. Ends the process if it fails, or if this call is cancelled. Raises
        `ConfigError` if the grammar is not valid, or takes too much time or memory."""
        try:
            with anyio.fail_after(_COMPILE_S):
                await anyio.wait_readable(self._channel)
            self.mask(0)  # of the first token: the result of the compilation
        except TimeoutError as error:
            raise self._failure() from error
        except BaseException:
            self.end()
            raise

    def __call__(self) -> "_Answer":
        number = next(self._numbers)
        with self._lock:
            self._masks[number] = self._masks[0]
        answer = _Answer(self, number)
        weakref.finalize(answer, self._forget, number).atexit = False
        return answer

    def mask(self, answer: int) -> bytes:
        """Return the tokens that may follow."""
        with self._lock:
            while (found := self._masks[answer]) is None:
                self._receive(answer)
            return found

    def accept(self, answer: int, token: int) -> bool:
        """Add a token. Returns True if only an end token may follow."""
        with self._lock:
            self._masks[answer] = None
            try:
                process.send(self._channel, process.TOKEN, answer, token.to_bytes(4, "little"))
            except OSError as error:
                raise self._failure() from error
            while (ended := self._receive(answer)) is None:
                pass
            return ended

    def _receive(self, answer: int) -> bool | None:
        """Receive one frame. Masks and errors are kept, because another answer may wait for them. Returns whether only
        an end token may follow, if the frame says this of `answer`."""
        if answer not in self._errors:
            try:
                kind, number, body = process.receive(self._source)
            except (EOFError, OSError, ValueError) as error:  # ValueError: the process was ended
                raise self._failure() from error
            if kind == process.ACCEPTED:
                return bool(body[0]) if number == answer else None
            if kind == process.ERROR:
                self._errors[number] = body.decode()
            elif number in self._masks:
                self._masks[number] = body
        if answer in self._errors:
            raise ConfigError(f"the JSON schema is not valid or cannot be followed: {self._errors[answer]}")
        return None

    def _failure(self) -> ConfigError:
        self.end()
        return ConfigError("the JSON schema takes too much time or memory; use a simpler one")

    def _forget(self, answer: int) -> None:
        with self._lock, suppress(OSError):
            self._masks.pop(answer)
            self._errors.pop(answer, None)
            process.send(self._channel, process.FORGET, answer)


class _Answer:
    """The state of one answer: a `Grammar`."""

    def __init__(self, grammar: CompiledGrammar, number: int) -> None:
        self._grammar, self._number = grammar, number

    def allowed(self) -> bytes:
        return self._grammar.mask(self._number)

    def accept(self, token: int) -> bool:
        return self._grammar.accept(self._number, token)


def _close(source: BinaryIO, channel: socket.socket, pipe: int) -> None:
    os.close(pipe)  # ends the process
    source.close()
    channel.close()


def _end(started: subprocess.Popen[bytes], control: socket.socket) -> None:
    control.close()
    with suppress(ProcessLookupError):
        os.killpg(started.pid, signal.SIGKILL)
    started.wait()
