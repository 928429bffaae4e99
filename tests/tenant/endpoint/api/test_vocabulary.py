"""Grammars: the limits of time and memory of their processes, and turns of clients."""

import asyncio
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from symbiosis_priv.errors import ConfigError, OverloadedError
from tenant.endpoint.api import vocabulary as module
from tenant.endpoint.api.vocabulary import Vocabulary
from tests.waiting import until

LONG: dict[str, Any] = {"multipleOf": 9_999_991}  # a minute and more
LARGE: dict[str, Any] = {"allOf": [{"pattern": f".*{chr(97 + i)}.*"} for i in range(26)], "type": "string"}  # 10 GiB


@pytest.fixture(scope="module")
def vocabulary(tokenizer: Any) -> Iterator[Vocabulary]:
    found = Vocabulary(tokenizer, size=320, ends=[tokenizer.eos_token_id])
    yield found
    found.close()


def rules(schema: Any) -> str:
    return f"start: %json {json.dumps(schema)}"


def tokens(mask: bytes) -> set[int]:
    return {8 * place + bit for place, byte in enumerate(mask) for bit in range(8) if byte >> bit & 1}


@pytest.mark.parametrize("schema", [LONG, LARGE])
def test_a_grammar_that_takes_too_much_is_refused_and_delays_no_other_client(
    vocabulary: Vocabulary, schema: Any
) -> None:
    async def both() -> None:
        long = asyncio.ensure_future(vocabulary.grammar(rules(schema), client="one"))
        await asyncio.sleep(0)
        await vocabulary.grammar(rules({"type": "integer"}), client="two")
        assert not long.done()
        with pytest.raises(ConfigError, match="too much time or memory"):
            await long

    asyncio.run(both())


def test_the_grammar_of_a_client_that_leaves_is_ended(vocabulary: Vocabulary) -> None:
    async def left() -> None:
        vocabulary._kept.clear()
        until(lambda: forks(vocabulary) == 0)
        long = asyncio.ensure_future(vocabulary.grammar(rules(LONG), client="one"))
        while not forks(vocabulary) and not long.done():
            await asyncio.sleep(0.01)
        assert not long.done()
        long.cancel()
        await asyncio.gather(long, return_exceptions=True)
        until(lambda: forks(vocabulary) == 0)

    asyncio.run(left())


def forks(vocabulary: Vocabulary) -> int:
    """The number of processes of grammars."""
    assert vocabulary._started is not None
    pid = vocabulary._started[0].pid
    return len(Path(f"/proc/{pid}/task/{pid}/children").read_text().split())


def test_all_processes_end_with_the_endpoint(tokenizer: Any) -> None:
    vocabulary = Vocabulary(tokenizer, size=320, ends=[1])
    grammar = asyncio.run(vocabulary.grammar(rules({"type": "integer"}), client=""))
    assert vocabulary._started is not None
    started, control = vocabulary._started
    control.close()  # as if the endpoint was killed
    assert started.wait(60) == -9
    with pytest.raises(ConfigError):
        grammar().accept(1)
    again = asyncio.run(vocabulary.grammar(rules({"type": "integer"}), client=""))
    assert again is not grammar
    assert tokens(again().allowed())
    vocabulary.close()


def test_each_token_has_a_budget(tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Masks are computed in the pass of all clients. Here the budget is shorter than a usual mask takes."""
    short = "from tenant.endpoint.api import grammar_process as g; g._SAVED_S = g._TOKEN_S = 1e-6; g.main()"
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\nexec {sys.executable} -c '{short}'\n")
    python.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(python))
    vocabulary = Vocabulary(tokenizer, size=320, ends=[1])
    answer = asyncio.run(vocabulary.grammar(rules({"type": "string"}), client=""))()
    with pytest.raises(ConfigError, match="too much time"):
        follow(answer, tokenizer('"' + "abc" * 4000, add_special_tokens=False)["input_ids"])
    vocabulary.close()


def follow(answer: Any, found: list[int]) -> None:
    for token in found:
        answer.accept(token)
        answer.allowed()


def test_answers_of_one_grammar_do_not_mix(vocabulary: Vocabulary, tokenizer: Any) -> None:
    grammar = asyncio.run(vocabulary.grammar('start: "ab" | "cd"', client="one"))
    first, second = grammar(), grammar()
    (a,), (b,), (c,), (d,) = (tokenizer(one, add_special_tokens=False)["input_ids"] for one in "abcd")
    assert not first.accept(a)
    assert not second.accept(c)
    assert b in tokens(first.allowed())
    assert tokens(second.allowed()) == {d} | (tokens(second.allowed()) - {b})
    assert second.accept(d)
    with pytest.raises(ConfigError, match="cannot be followed"):
        first.accept(c)


def test_a_client_leaves_places_to_others(vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PLACES", 4)
    vocabulary._kept.clear()

    async def taken() -> None:
        held = [await vocabulary.grammar(f'start: "{i}"', client="one") for i in range(2)]
        with pytest.raises(OverloadedError):
            await vocabulary.grammar('start: "x"', client="one")
        assert await vocabulary.grammar('start: "1"', client="one") is held[1]
        await vocabulary.grammar('start: "x"', client="two")
        del held[0]
        await vocabulary.grammar('start: "x"', client="one")

    asyncio.run(taken())
