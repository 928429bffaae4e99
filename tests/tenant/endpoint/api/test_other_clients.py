"""Clients that this project does not depend on; each test skips itself without its client. To run them:
`pip install langchain-openai litellm "lm-eval[api]" schemathesis`.
"""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tenant.endpoint.api.conftest import KEY, Served

pytestmark = pytest.mark.filterwarnings("default")  # of the clients


def weather(city: str) -> str:
    """The weather in a city."""
    return city


def test_langchain_chats_streams_and_calls_tools(served: Served, client: Any) -> None:
    langchain = pytest.importorskip("langchain_openai")
    said: dict[str, Any] = {"base_url": f"{served.url}/v1", "api_key": KEY, "max_retries": 0, "model": "lora"}
    chat = langchain.ChatOpenAI(**said, max_tokens=12, temperature=0, stream_usage=True)
    answer = client.chat.completions.create(
        model="lora", messages=[{"role": "user", "content": "Hello"}], max_tokens=12, temperature=0
    )
    expected = answer.choices[0].message.content
    assert chat.invoke("Hello").content == expected
    pieces = list(chat.stream("Hello"))
    assert "".join(piece.content for piece in pieces) == expected
    assert sum(piece.usage_metadata["output_tokens"] for piece in pieces if piece.usage_metadata) == 12
    assert [one.content for one in chat.batch(["Hello", "Hello"])] == [expected] * 2
    assert chat.bind_tools([weather], strict=True).invoke("Hello").content
    schema = {"title": "empty", "type": "object", "properties": {}, "additionalProperties": False}
    for method in ("json_schema", "function_calling"):
        longer = langchain.ChatOpenAI(**said, max_tokens=100, temperature=0)
        assert longer.with_structured_output(schema, method=method, strict=True).invoke("Hello") == {}
    assert langchain.ChatOpenAI(**said, max_tokens=4, use_responses_api=True).invoke("Hello").text
    # without the argument, it sends tokens of OpenAI's own vocabulary
    embeddings = langchain.OpenAIEmbeddings(**said, check_embedding_ctx_length=False)
    assert len(embeddings.embed_query("Hello")) == 64


def test_litellm_chats_and_streams(served: Served, client: Any) -> None:
    litellm = pytest.importorskip("litellm")
    asked: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 12, "temperature": 0}
    expected = client.chat.completions.create(model="lora", **asked).choices[0].message.content
    said = asked | {"model": "openai/lora", "api_base": f"{served.url}/v1", "api_key": KEY, "num_retries": 0}
    assert litellm.completion(**said).choices[0].message.content == expected
    pieces = litellm.completion(**said, stream=True)
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces) == expected


def test_lm_eval_gets_the_log_probabilities_of_the_model(
    served: Served, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = pytest.importorskip("lm_eval.models.openai_completions")
    instance = pytest.importorskip("lm_eval.api.instance").Instance
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    model = models.LocalCompletionsAPI(
        model="tiny", base_url=f"{served.url}/v1/completions", tokenizer=str(checkpoint), max_length=512, max_retries=1
    )
    asked = instance(request_type="loglikelihood", doc={}, arguments=("Hello", " there"), idx=0)
    ((found, _),) = model.loglikelihood([asked])
    tokenizer = served.service.tokenizer
    ids = torch.tensor([tokenizer("Hello there", add_special_tokens=False)["input_ids"]])
    begin = len(tokenizer("Hello", add_special_tokens=False)["input_ids"])
    with torch.no_grad():
        logprobs = served.service.model(input_ids=ids).logits[0].double().log_softmax(-1)
    expected = sum(float(logprobs[place - 1, ids[0, place]]) for place in range(begin, ids.shape[1]))
    assert found == pytest.approx(expected, abs=1e-3)


def test_schemathesis_finds_nothing(served: Served, tmp_path: Path) -> None:
    pytest.importorskip("schemathesis")
    (tmp_path / "schemathesis.toml").write_text('[parameters]\n"body.model" = "tiny"\n')
    command = [sys.executable, "-m", "schemathesis.cli", "run", f"{served.url}/openapi.json"]
    command += ["--header", f"Authorization: Bearer {KEY}", "--phases", "coverage,fuzzing", "--max-examples", "10"]
    # some fields need each other, which JSON schema cannot say
    command += ["--exclude-checks", "positive_data_acceptance", "--seed", "1", "--request-timeout", "300"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-4000:]
