"""Items and figures of `examples/zero_shot.py`. With lm-eval, which is not a requirement, the whole example runs."""

import ast
import importlib.util
import math
import random
import sys
from pathlib import Path
from typing import Any

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples/zero_shot.py"
SENTENCES = ["The parser reads a header before the body.", "After an error the parser drops what it read of the body."]
MODULE = ast.parse("".join(f'def f{i}(a, b={i}):\n    """Return the value number {i} of b."""\n' for i in range(5)))


@pytest.fixture(scope="module")
def example() -> Any:
    spec = importlib.util.spec_from_file_location("zero_shot", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_right_choice_is_what_the_text_says(example: Any) -> None:
    rng = random.Random(0)
    (last,) = example.last_words([SENTENCES])
    assert f"{last['context']} {last['choices'][0]}." == " ".join(SENTENCES)
    found = {
        "ending": (list(example.endings([SENTENCES] * 5, rng)), SENTENCES[1]),
        "word": (list(example.which_word([SENTENCES] * 5, rng)), " ".join(SENTENCES)),
    }
    for items, text in found.values():
        assert len(items) == 5
        assert all(f"{one['context']} {one['choices'][one['answer']]}" == text for one in items)
    summaries = list(example.summaries([MODULE], rng))
    assert [one["choices"][one["answer"]] for one in summaries] == [
        f"Return the value number {i} of b." for i in range(5)
    ]
    assert all(len(set(one["choices"])) == 4 for one in summaries)


def test_the_standard_error_of_a_change_counts_changed_items_only(example: Any) -> None:
    reference = {"a": [1.0, 0.0, 1.0, 1.0], "b": [1.0, 0.0, 0.0, 0.0]}
    row = example.figures("ring", reference | {"a": [1.0, 1.0, 1.0, 1.0]}, reference)
    assert (row["a"], row["mean"], row["change"], row["items_that_change"]) == (100.0, 62.5, 12.5, 1)
    assert row["standard_error_of_the_change"] == round(100 * math.sqrt(0.25 / 4) / 2, 2)
    assert example.figures("float32", reference, reference)["standard_error_of_the_change"] == 0


def test_the_example_runs_or_says_what_to_install(
    example: Any, tiny: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["zero_shot.py", str(tiny), "--items", "2"])
    if importlib.util.find_spec("lm_eval") is None:
        with pytest.raises(SystemExit):
            example.main()
        assert "pip install lm-eval" in capsys.readouterr().err
    else:
        example.main()
        assert "bfloat16" in capsys.readouterr().out
