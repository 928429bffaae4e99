"""`tenant serve` over real providers with pads, and the official client."""

import contextlib
import http.client
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import torch
from openai import InternalServerError, OpenAI
from peft import LoraConfig

from symbiosis_priv.harness.local import LocalFederation
from tenant import RemoteConfig
from tenant.model.loading import load_adapter, load_language_model, load_tokenizer
from tests.adapters import write_adapter
from tests.waiting import beside, until
from tests.warm import Popen

SECRET = "zyxwvut"


@pytest.fixture(scope="module")
def folder(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model `tiny` and an adapter `lora`."""
    folder = tmp_path_factory.mktemp("serve")
    shutil.copytree(tiny, folder / "tiny")
    base, config = load_language_model(folder / "tiny"), LoraConfig(target_modules="all-linear")
    write_adapter(base, folder / "lora", config, scale=0.2)
    return folder


@contextlib.contextmanager
def serving(folder: Path, local: LocalFederation, *more: str) -> Iterator[tuple[Popen, str, str]]:
    """The process, its URL, and its key."""
    command = [sys.executable, "-m", "symbiosis_priv.cli", "tenant", "serve", "--model", str(folder / "tiny")]
    command += ["--federation", str(local.federation), "--adapter", f"lora={folder / 'lora'}", *more]
    with (folder / "log").open("w") as log:
        process = Popen([*command, "--listen", "127.0.0.1:0"], stdout=subprocess.PIPE, stderr=log, text=True, bufsize=1)
    assert process.stdout is not None
    try:
        text = ""
        while "OPENAI_API_KEY" not in text:
            line = process.stdout.readline()
            assert line, (folder / "log").read_text()
            text += line
        found = re.search(r"OPENAI_BASE_URL=(\S+) OPENAI_API_KEY=(\S+)", text)
        assert found is not None
        assert "serving tiny, lora at" in text
        yield process, found[1], found[2]
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.fixture(scope="module")
def local(folder: Path) -> Iterator[LocalFederation]:
    with LocalFederation(folder / "tiny", folder / "federation") as local:
        yield local


def test_a_request_that_waits_for_a_dead_executor_delays_no_end(folder: Path, local: LocalFederation) -> None:
    with serving(folder, local, "--drain", "0") as (process, url, key), OpenAI(base_url=url, api_key=key) as client:

        def get(path: str) -> tuple[int, str]:
            connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=60)
            with contextlib.closing(connection):
                connection.request("GET", path, headers={"Authorization": f"Bearer {key}"})
                answer = connection.getresponse()
                return answer.status, answer.read().decode()

        def ask() -> None:
            with pytest.raises(InternalServerError, match="the endpoint is stopping"):
                client.with_options(max_retries=0).completions.create(model="tiny", prompt="Hello", max_tokens=400)

        assert get("/ready")[0] == 200
        local.kill("executor")
        until(lambda: get("/ready")[0] == 503)
        local.restart("executor")
        until(lambda: get("/ready")[0] == 200)
        local.kill("executor")
        with beside(ask):
            until(lambda: re.search(r'"left_s":\d', get("/ledger")[1]))  # the request waits
            process.send_signal(signal.SIGINT)
            process.wait(45)  # the request would wait for two minutes
        local.restart("executor")


def test_tokens_are_those_of_generate_and_a_stream_outlives_sigterm(folder: Path, local: LocalFederation) -> None:
    with serving(folder, local) as (process, url, key):
        tokenizer = load_tokenizer(folder / "tiny")
        model = load_language_model(folder / "tiny", remote=RemoteConfig(masking="simulate"))
        prompt = f"Hello {SECRET}"
        ids = torch.tensor([tokenizer(prompt)["input_ids"]])
        expected = {}
        for name in ("tiny", "lora"):
            model = model if name == "tiny" else load_adapter(model, folder / "lora")
            tokens = model.generate(
                input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False
            )
            expected[name] = tokenizer.decode(tokens[0, ids.shape[1] :], skip_special_tokens=True)

        with OpenAI(base_url=url, api_key=key, max_retries=0) as client:
            found: dict[str, str] = {}
            asked: Any = {"prompt": prompt, "max_tokens": 24, "temperature": 0}

            def ask(name: str) -> None:
                answer: Any = client.completions.create(model=name, **asked)
                found[name] = answer.choices[0].text
                assert answer.usage.ledger["answers_verified"] >= answer.usage.ledger["rows"] > 0

            with beside(*(partial(ask, name) for name in expected)):
                pass
            assert found == expected

            pieces = client.completions.create(model="lora", stream=True, **asked)
            text = next(pieces).choices[0].text
            process.send_signal(signal.SIGTERM)
            text += "".join(piece.choices[0].text for piece in pieces)
            assert text == expected["lora"]
        assert process.wait(60) == 0
        shown = (folder / "log").read_text()
        assert SECRET not in shown
        assert key not in shown
