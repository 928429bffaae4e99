"""Tinker's API on loopback: the tiny Llama in `simulate`, and the official client, unchanged."""

import gc
import json
import threading
import urllib.error
import urllib.request
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tenant import RemoteConfig
from tenant.endpoint import serving
from tenant.endpoint.options import Serving
from tests.waiting import answering

with suppress(ImportError):  # the tests skip themselves
    import tinker

KEYS = ("tml-first-key-of-the-test", "tml-second-key-of-the-test")
TEXTS = [[5, 9, 7, 11, 3], [8, 2, 4], [100, 40, 6, 6, 1, 90, 17]]
_WARNINGS = (":ResourceWarning", ":pytest.PytestUnraisableExceptionWarning", ":FutureWarning", "Model")
QUIET = [pytest.mark.filterwarnings(f"ignore:{one}") for one in _WARNINGS]
"""The client leaves a connection open, and PEFT warns of adapters of a tied head."""


@contextmanager
def served(checkpoint: Path, folder: Path, *, name: str = "tiny") -> Iterator[str]:
    """The address of an endpoint."""
    options = Serving(tinker=folder, listen="127.0.0.1:0", api_key_file=Path("keys"))
    remote, clients = RemoteConfig(masking="simulate"), len(KEYS)
    opened = serving.opened(checkpoint, remote, name=name, adapters={}, options=options, clients=clients)
    with options.listener() as listener, opened as service:
        server = serving.server(service, listener, keys=KEYS, masking="simulate", options=options)
        with answering(server):
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"


@pytest.fixture(scope="module")
def address(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with served(checkpoint, tmp_path_factory.mktemp("checkpoints")) as address:
        yield address


@pytest.fixture
def connect(address: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """`connect(0)` returns the official client with the first key."""
    monkeypatch.setenv("TINKER_TELEMETRY", "0")
    with ExitStack() as stack:

        def connected(number: int = 0) -> Any:
            return stack.enter_context(tinker.ServiceClient(base_url=address, api_key=KEYS[number]))

        yield connected
    collect()


@pytest.fixture
def train(connect: Any) -> Any:
    """`train(0, rank=4, seed=1)` returns a new training client of the first key."""

    return lambda key=0, **options: (
        connect(key).create_lora_training_client("tiny", **({"rank": 2, "seed": 1} | options)).result()
    )


def collect() -> None:
    """Free what clients have left: an open connection each."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()


def data_of(texts: list[list[int]] = TEXTS, **inputs: Any) -> list[Any]:
    """Examples with these inputs of the loss; without any, with weights."""
    found = []
    for text in texts:
        own = {"target_tokens": torch.tensor(text[1:])} | (inputs or {"weights": torch.linspace(0.5, 1, len(text) - 1)})
        found.append(tinker.Datum(model_input=tinker.ModelInput.from_ints(text[:-1]), loss_fn_inputs=own))
    return found


def adam() -> Any:
    return tinker.AdamParams(learning_rate=1e-2, weight_decay=0.01, grad_clip_norm=1.0)


def steps(training: Any, count: int = 3, texts: list[list[int]] = TEXTS) -> list[list[Tensor]]:
    """Log probabilities of each step."""
    found = []
    for _ in range(count):
        forward = training.forward_backward(data_of(texts), "cross_entropy")
        training.optim_step(adam()).result()
        found.append(outputs(forward.result()))
    return found


def outputs(output: Any) -> list[Tensor]:
    return [one["logprobs"].to_torch() for one in output.loss_fn_outputs]


def equal(first: list[list[Tensor]], second: list[list[Tensor]]) -> bool:
    return all(torch.equal(a, b) for one, two in zip(first, second, strict=True) for a, b in zip(one, two, strict=True))


def post(address: str, route: str, body: dict[str, Any], key: str = KEYS[0]) -> tuple[int, bytes]:
    headers = {"X-API-Key": key, "Content-Type": "application/json"}
    request = urllib.request.Request(f"{address}/api/v1/{route}", json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


class Gate:
    """Stops the thread that calls `pass_`, after the first `after` times, until the test opens the gate. `passed`: the
    arguments of all calls. The limits only end a test that would hang."""

    def __init__(self, then: Callable[..., Any]) -> None:
        self.reached, self.opened, self.after = threading.Event(), threading.Event(), 0
        self.passed, self._then = list[tuple[Any, ...]](), then

    def wait(self) -> None:
        assert self.reached.wait(300)

    def pass_(self, *args: Any) -> Any:
        self.passed.append(args)
        if len(self.passed) > self.after:
            self.reached.set()
            assert self.opened.wait(300)
        return self._then(*args)
