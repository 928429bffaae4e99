"""The official client, unchanged, against an endpoint."""

import json
import math
from functools import partial
from typing import Any

import openai
import pytest

from tenant.endpoint.engine.requests import EngineRequest
from tests.cases import cases
from tests.tenant.endpoint.api.conftest import Served
from tests.tenant.endpoint.api.test_guard import ask

HELLO: Any = [{"role": "user", "content": "Hello there"}]
SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["n"],
    "additionalProperties": False,
}


def test_a_prompt_is_a_text_or_token_ids(client: Any, tokenizer: Any) -> None:
    """That the tokens are those of `generate()` is shown in tests/end_to_end/test_serve.py."""
    ids = tokenizer("Hello there")["input_ids"]
    found = [client.completions.create(model="lora", prompt=one, temperature=0) for one in ("Hello there", ids)]
    assert found[0].choices == found[1].choices
    assert [one.usage.prompt_tokens for one in found] == [len(ids)] * 2
    pieces = client.completions.create(model="lora", prompt=ids, temperature=0, stream=True)
    assert "".join(piece.choices[0].text for piece in pieces) == found[0].choices[0].text


def test_a_chat_whole_and_in_pieces(client: Any) -> None:
    asked: Any = {"model": "lora", "messages": HELLO, "seed": 5, "temperature": 0.8, "top_p": 0.9}
    asked |= {"max_completion_tokens": 12, "n": 3, "logprobs": True, "top_logprobs": 2}
    whole = client.chat.completions.create(**asked)
    assert len({choice.message.content for choice in whole.choices}) > 1
    texts, logprobs = {0: "", 1: "", 2: ""}, dict[int, list[float]]()
    options = {"include_usage": True, "include_ledger": True}
    *chunks, last = client.chat.completions.create(**asked, stream=True, stream_options=options)
    for chunk in chunks:
        assert chunk.usage is None
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            if choice.logprobs is not None:
                logprobs.setdefault(choice.index, []).extend(one.logprob for one in choice.logprobs.content)
    counts = {"prompt_tokens", "completion_tokens", "total_tokens"}  # the second prompt was cached
    assert last.usage.model_dump(include=counts) == whole.usage.model_dump(include=counts)
    for choice in whole.choices:
        assert texts[choice.index] == choice.message.content
        assert logprobs[choice.index] == [one.logprob for one in choice.logprobs.content]
        assert all(len(one.top_logprobs) == 2 and one.bytes is not None for one in choice.logprobs.content)
    assert whole.model == "lora"


def test_stop_texts_penalties_and_biases(client: Any) -> None:
    def first(**more: Any) -> Any:
        answer = client.completions.create(model="tiny", prompt="Hello", max_tokens=24, temperature=0, **more)
        return answer.choices[0]

    free = first().text
    stop = free[4:6]
    assert first(stop=stop).text == free[: free.index(stop)]
    assert first(stop=["never", stop]).finish_reason == "stop"
    assert first(frequency_penalty=2.0).text != free
    assert len(set(first(logit_bias={"40": 100}).text)) == 1


def test_echo_and_log_probabilities_of_the_prompt(client: Any, tokenizer: Any) -> None:
    asked: Any = {"model": "tiny", "prompt": ["Hello there", "Good"], "max_tokens": 1, "temperature": 0}
    asked |= {"echo": True, "logprobs": 1}
    answer = client.completions.create(**asked)
    pieces = list(client.completions.create(**asked, stream=True))
    for index, (choice, prompt) in enumerate(zip(answer.choices, asked["prompt"], strict=True)):
        found: Any = choice.logprobs
        assert choice.text.startswith(prompt)
        assert len(found.tokens) == len(found.text_offset) == len(tokenizer(prompt)["input_ids"]) + 1
        assert found.token_logprobs[0] is None
        for logprob, top in zip(found.token_logprobs[1:], found.top_logprobs[1:], strict=True):
            assert logprob <= max(top.values()) <= 0
        mine: Any = [piece.choices[0] for piece in pieces if piece.choices[0].index == index]
        assert "".join(one.text for one in mine) == choice.text
        assert [one for part in mine if part.logprobs for one in part.logprobs.tokens] == found.tokens
        assert [one for part in mine if part.logprobs for one in part.logprobs.text_offset] == found.text_offset
    assert client.completions.create(**(asked | {"max_tokens": 0})).choices[0].text == "Hello there"


def test_the_lines_of_a_stream_are_those_of_every_client(served: Served) -> None:
    """Python's `splitlines`, which clients on httpx use, divides lines at other characters than the standard does."""
    text = "a\u2028b\u2029c\x85d\x0be\x0cf\x1cg"
    body = {"model": "tiny", "prompt": text, "max_tokens": 0, "echo": True, "stream": True}
    _, sent = ask(served, "POST", "/v1/completions", body)
    lines = sent.splitlines()
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    assert "".join(event["choices"][0]["text"] for event in events) == text
    assert all(line.startswith("data: ") for line in lines if line)


def test_json_answers_follow_their_schema(client: Any) -> None:
    asked: Any = {"model": "lora", "messages": HELLO, "max_tokens": 60, "temperature": 1}
    form = {"type": "json_schema", "json_schema": {"name": "number", "schema": SCHEMA, "strict": True}}
    for seed in range(4):
        (choice,) = client.chat.completions.create(**asked, seed=seed, response_format=form).choices
        assert choice.finish_reason == "stop"  # white space does not take all tokens
        assert 0 <= json.loads(choice.message.content)["n"] <= 99
    free = client.chat.completions.create(**asked | {"max_tokens": 8}, response_format={"type": "json_object"})
    assert free.choices[0].message.content.lstrip()[:1] in ("", "{")


def test_a_tool_can_be_forced(client: Any) -> None:
    place = {"properties": {"city": {"$ref": "#/$defs/c"}}, "required": ["city"], "$defs": {"c": {"enum": ["Bern"]}}}
    closed = {"additionalProperties": False}
    functions = [{"name": "weather", "parameters": place | closed}, {"name": "now", "parameters": closed}]
    asked: Any = {"model": "lora", "messages": HELLO, "max_tokens": 80, "temperature": 1, "seed": 1}
    asked["tools"] = [{"type": "function", "function": {**function, "strict": True}} for function in functions]
    named = {"type": "function", "function": {"name": "weather"}}
    whole = client.chat.completions.create(**asked, tool_choice=named, parallel_tool_calls=False).choices[0]
    (call,) = whole.message.tool_calls
    assert (call.function.name, whole.finish_reason, whole.message.content) == ("weather", "tool_calls", None)
    assert json.loads(call.function.arguments) == {"city": "Bern"}
    *chunks, last = client.chat.completions.create(**asked, tool_choice=named, stream=True)
    (streamed,) = [part for chunk in chunks for part in chunk.choices[0].delta.tool_calls or ()]
    assert last.choices[0].finish_reason == "tool_calls"
    assert streamed.function.arguments == call.function.arguments
    free = client.chat.completions.create(**asked | {"max_tokens": 8}, parallel_tool_calls=False)
    assert free.choices[0].message.content
    called = client.chat.completions.create(**asked, tool_choice="required").choices[0].message.tool_calls
    assert [one.function.name in ("weather", "now") for one in called] == [True]


@pytest.mark.parametrize("arguments", ["", "{}", "null", '{"city": "Bern"}', "[]", "5", '"x"', "{"])
def test_calls_of_earlier_answers_have_an_object_or_nothing_as_arguments(client: Any, arguments: str) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    messages: Any = [*HELLO, {"role": "assistant", "tool_calls": [call]}]
    messages.append({"role": "tool", "tool_call_id": "call_1", "content": "rain"})
    if arguments in ("[]", "5", '"x"', "{"):
        with pytest.raises(openai.BadRequestError, match="no JSON of an object") as refused:
            client.chat.completions.create(model="tiny", messages=messages, max_tokens=1)
        assert refused.value.param == "messages.1.tool_calls"
    else:
        assert client.chat.completions.create(model="tiny", messages=messages, max_tokens=1).choices


def test_responses_are_chats(client: Any) -> None:
    asked: Any = {"model": "lora", "temperature": 0}
    chat = client.chat.completions.create(**asked, messages=HELLO, max_tokens=8)
    response = client.responses.create(**asked, input="Hello there", max_output_tokens=8, store=False)
    assert response.output_text == chat.choices[0].message.content
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert response.usage.input_tokens == chat.usage.prompt_tokens
    conversation = [{"role": "user", "content": "Hello there"}, *response.output, *HELLO]
    more = [HELLO[0], chat.choices[0].message.model_dump(include={"role", "content"}), HELLO[0]]
    again = client.responses.create(**asked, input=conversation, instructions="Be brief", max_output_tokens=8)
    system = [{"role": "system", "content": "Be brief"}]
    expected = client.chat.completions.create(**asked, messages=system + more, max_tokens=8)
    assert again.output_text == expected.choices[0].message.content
    with client.responses.stream(**asked, input="Hello there", max_output_tokens=8) as stream:
        first, *_, last = stream
    assert (first.type, last.type) == ("response.created", "response.incomplete")
    assert last.response.output_text == response.output_text


def test_responses_call_tools_and_follow_schemas(client: Any) -> None:
    tool = {"type": "function", "name": "weather", "parameters": {"additionalProperties": False}, "strict": False}
    asked: Any = {"model": "lora", "input": "Hello", "max_output_tokens": 80, "tools": [tool]}
    asked["tool_choice"] = {"type": "function", "name": "weather"}
    (call,) = client.responses.create(**asked).output
    assert (call.type, call.name, call.arguments) == ("function_call", "weather", "{}")
    with client.responses.stream(**asked) as stream:
        assert [event.arguments for event in stream if event.type.endswith("arguments.done")] == ["{}"]
        assert stream.get_final_response().output[0].name == "weather"
    assert client.responses.create(**asked, metadata={"a": "b"}).metadata == {"a": "b"}
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
    asked = {"model": "lora", "input": [HELLO[0], call, result], "max_output_tokens": 1, "tools": [tool]}
    said = client.responses.create(**asked, temperature=0)  # a drawn token may be the end
    assert said.status == "incomplete"
    schema = {"type": "object", "additionalProperties": False}
    form: Any = {"format": {"type": "json_schema", "name": "n", "schema": schema}}
    answer = client.responses.create(model="lora", input="Hello", text=form, temperature=0, max_output_tokens=8)
    assert answer.output_text.strip()[:1] in ("", "{")


@pytest.fixture(scope="module")
def called(client: Any) -> tuple[dict[str, Any], Any, Any, Any]:
    """What a forced call was asked with, and its answer: whole, as a stream that the client puts together, and as a
    response."""
    function = {"name": "now", "parameters": {"additionalProperties": False}}
    asked: Any = {"model": "lora", "max_tokens": 80, "tools": [{"type": "function", "function": function}]}
    forced: Any = asked | {"messages": HELLO, "tool_choice": "required"}
    whole = client.chat.completions.create(**forced)
    with client.chat.completions.stream(**forced) as stream:
        stream.until_done()
        streamed = stream.get_final_completion()
    tools = [{"type": "function", **function}]
    response = client.responses.create(model="lora", input=HELLO, tools=tools, tool_choice="required")
    return asked, whole, streamed, response


def test_answers_are_taken_back_as_the_client_dumps_them(client: Any, called: Any) -> None:
    asked, *answers, response = called
    asked = asked | {"max_tokens": 5}
    for message in (answer.choices[0].message for answer in answers):
        result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "noon"}
        for dumped in (message.model_dump(), message.to_dict()):
            again = client.chat.completions.create(**asked, messages=[*HELLO, dumped, result])
            client.chat.completions.create(**asked, messages=[*HELLO, again.choices[0].message.model_dump(), *HELLO])
    (call,) = response.output
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "noon"}
    for dumped in (call.model_dump(), call.to_dict()):
        again = client.responses.create(model="lora", input=[*HELLO, dumped, result], max_output_tokens=5)
        said = [one.model_dump() for one in again.output]
        client.responses.create(model="lora", input=[*HELLO, *said, *HELLO], max_output_tokens=1)


def test_responses_take_lists_of_results_and_reasoning(client: Any, called: Any) -> None:
    (call,) = called[-1].output

    def tokens(*items: Any) -> int:
        answer = client.responses.create(model="lora", input=[*HELLO, *items], max_output_tokens=1)
        return int(answer.usage.input_tokens)

    def result(output: Any) -> dict[str, Any]:
        return {"type": "function_call_output", "call_id": call.call_id, "output": output}

    listed = [{"type": "input_text", "text": "no"}, {"type": "input_text", "text": "on"}]
    reasoning = {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "x"}], "content": None}
    expected = tokens(call, result("noon"))
    assert tokens(call, result(listed)) == tokens(reasoning, call, result("noon")) == expected


def test_all_chunks_of_a_stream_have_a_usage_if_it_was_asked_for(served: Served) -> None:
    for path, more in (("completions", {"prompt": "Hello"}), ("chat/completions", {"messages": HELLO})):
        for options in ({"include_usage": True}, None):
            body = {"model": "tiny", "max_tokens": 2, "stream": True, "stream_options": options, **more}
            _, sent = ask(served, "POST", f"/v1/{path}", body)
            chunks = [json.loads(line[6:]) for line in sent.splitlines() if line.startswith("data: {")]
            if options is None:
                assert not any("usage" in chunk for chunk in chunks)
            else:
                assert [chunk["usage"] for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
                assert chunks[-1]["usage"]["completion_tokens"] == 2


def test_more_texts_are_embedded_than_may_wait(client: Any) -> None:
    """The engine of this endpoint lets 32 requests of a client wait; LangChain sends 1,000 texts at a time."""
    texts = [[number] for number in range(100)]
    found = client.embeddings.create(model="tiny", input=texts, encoding_format="float")
    assert [one.index for one in found.data] == list(range(100))
    assert found.usage.prompt_tokens == 100
    alone = client.embeddings.create(model="tiny", input=texts[77], encoding_format="float")
    assert found.data[77].embedding == alone.data[0].embedding


def test_embeddings_in_both_encodings(client: Any) -> None:
    texts = ["Hello there", "Good morning"]
    plain = client.embeddings.create(model="tiny", input=texts, encoding_format="float")
    packed = client.embeddings.create(model="tiny", input=texts)  # the client asks for base64
    for one, other in zip(plain.data, packed.data, strict=True):
        assert one.embedding == pytest.approx(other.embedding)
        assert math.hypot(*one.embedding) == pytest.approx(1, abs=1e-5)
    adapted = client.embeddings.create(model="lora", input=texts[0])
    assert adapted.data[0].embedding != plain.data[0].embedding


PLAIN: dict[str, dict[str, Any]] = {
    "chat/completions": {"messages": HELLO},
    "embeddings": {"input": "Hello there"},
    "responses": {"input": HELLO},
}


@cases(__file__, "refused")
def test_a_refusal_names_the_field_and_the_reason(
    client: Any, route: str, send: dict[str, Any], param: str, says: str
) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.post(f"/{route}", body={"model": "tiny", **PLAIN[route], **send}, cast_to=object)
    assert refused.value.param == param
    assert says in refused.value.message


def test_too_many_texts_and_calls_are_refused_by_their_field(client: Any, called: Any) -> None:
    for route, many in ((client.embeddings, ["a"] * 2049), (client.responses, [*called[-1].output] * 129)):
        with pytest.raises(openai.BadRequestError, match=r"at most (2048|128) items") as refused:
            route.create(model="tiny", input=many)
        assert refused.value.param == "input"


def test_a_benchmark_gets_the_tokens_that_it_asked_for(client: Any, served: Served) -> None:
    """`ignore_eos` and `min_tokens` of vLLM's benchmark, for a model that ends at once."""
    end = str(min(served.service.ends))
    asked: Any = {"model": "tiny", "prompt": "Hello", "max_tokens": 6, "temperature": 0, "logit_bias": {end: 100}}
    for more, new, reason in (({}, 1, "stop"), ({"ignore_eos": True}, 6, "length"), ({"min_tokens": 4}, 5, "stop")):
        answer = client.completions.create(**asked, extra_body=more)
        assert (answer.usage.completion_tokens, answer.choices[0].finish_reason) == (new, reason)


def test_models_are_listed_and_unknown_ones_refused(client: Any) -> None:
    listed = {one.id: one for one in client.models.list()}
    assert set(listed) == {"tiny", "lora"}
    assert listed["lora"].model_extra["parent"] == "tiny"
    assert client.models.retrieve("lora").id == "lora"
    for ask_for in (client.models.retrieve, partial(client.completions.create, prompt="x")):
        with pytest.raises(openai.NotFoundError, match="none-such") as unknown:
            ask_for(model="none-such")
        assert unknown.value.code == "model_not_found"


@pytest.mark.parametrize(("own", "asked", "bucket"), [(1, 6, 6), (6, None, 6), (6, 4, 6), (4, 6, 6)])
def test_rows_fill_the_larger_bucket_of_endpoint_and_request(
    client: Any, served: Served, monkeypatch: pytest.MonkeyPatch, own: int, asked: int | None, bucket: int
) -> None:
    """Those of a chat, a completion and an embedding."""
    submitted = list[EngineRequest]()
    monkeypatch.setattr(served.service, "answer_bucket", own)
    monkeypatch.setattr(served.service.engine, "check", submitted.append)
    said = {"model": "tiny", "max_tokens": 3, "extra_body": {} if asked is None else {"answer_bucket": asked}}
    client.chat.completions.create(**said, messages=HELLO)
    client.completions.create(**said, prompt="Hello")
    client.embeddings.create(model="tiny", input=[[1], [2, 3]])
    assert [one.bucket for one in submitted] == [bucket, bucket, own, own]
