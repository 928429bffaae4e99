"""Zero-shot accuracy of a split model beside the whole one, by EleutherAI's lm-eval.

    pip install lm-eval
    python examples/zero_shot.py ~/.cache/symbiosis-priv/demo/SmolLM2-135M-Instruct

Nothing is downloaded: four tasks, in the forms of LAMBADA, HellaSwag, WinoGrande and of a question about code, are made
from the documentation and the sources of this Python. `--tasks lambada_openai,hellaswag,winogrande` takes tasks of
lm-eval, whose data sets it fetches. `masking="simulate"` has the bits of `pad`, and needs no provider.

All arithmetics answer the same items. So the standard error of a change counts only items whose verdict changes; that
of an accuracy says what another choice of items would change.
"""

import argparse
import ast
import importlib
import math
import random
import re
import shlex
import statistics
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path
from pydoc_data import topics
from typing import Any, Final

import msgspec
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tenant import RemoteConfig, backend_of
from tenant.bench.options import show
from tenant.bench.report import Goal, Row, figure, this_run, write

Item = dict[str, Any]  # a context, choices, and the index of the right one
Verdicts = dict[str, list[float]]  # by task: 1 for a right answer

_PROSE: Final = re.compile(r"[A-Z][A-Za-z0-9 ,.;:'\"()/_“”’-]*\.")  # has no code
_WITHIN: Final = 0.4  # points


def modules() -> list[ast.Module]:
    """The standard library."""
    root, others = Path(sysconfig.get_path("stdlib")), {"site-packages", "dist-packages", "test", "tests", "lib2to3"}
    paths = (path for path in sorted(root.rglob("*.py")) if not others & set(path.relative_to(root).parts))
    return [ast.parse(path.read_bytes()) for path in paths]


def paragraphs(found: Sequence[ast.Module]) -> list[list[str]]:
    """Different paragraphs of prose as their sentences, in the order in which they are written."""
    nodes = (node for module in found for node in ast.walk(module))
    documented = (node for node in nodes if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef))
    texts = [*topics.topics.values(), *(ast.get_docstring(node) or "" for node in documented)]
    parts = (" ".join(part.split()) for text in texts for part in re.split(r"\n\s*\n", re.sub("[*`]", "", text)))
    chosen = dict.fromkeys(part for part in parts if 15 <= len(part.split()) <= 50 and _PROSE.fullmatch(part))
    return [re.split(r"(?<=[.]) (?=[A-Z])", part) for part in chosen]


def last_words(found: Sequence[list[str]]) -> Iterator[Item]:
    """As LAMBADA: the last word, which was read before."""
    for paragraph in found:
        *before, last = " ".join(paragraph).rstrip(".").split()
        if len(last) >= 4 and last.isalpha() and last in re.findall("[a-z]+", " ".join(before[:-3]).lower()):
            yield {"context": " ".join(before), "choices": [last], "answer": 0}


def endings(found: Sequence[list[str]], rng: random.Random) -> Iterator[Item]:
    """As HellaSwag: the second half of a paragraph's last sentence, or that of one of three paragraphs nearby; all cut
    to one number of words."""
    halves = [(words[: len(words) // 2], words[len(words) // 2 :]) for *_, last in found for words in [last.split()]]
    for at, (begin, end) in enumerate(halves):
        near = [half for _, half in halves[max(0, at - 12) : at] + halves[at + 1 : at + 12]]
        near = [half for half in near if len(half) >= 5 and half[0][0].islower()]
        if len(end) >= 5 and len(near) >= 3:
            chosen = [end, *rng.sample(near, 3)]
            words = min(map(len, chosen))
            yield _item(" ".join(begin), [" ".join(half[:words]) for half in chosen], rng)


def which_word(found: Sequence[list[str]], rng: random.Random) -> Iterator[Item]:
    """As WinoGrande: which of two words of the earlier sentences stands in the last one."""
    for *before, last in found:
        known = sorted(set(re.findall("[a-z]{5,}", " ".join(before))))
        there = [word for word in known if f" {word} " in last]
        absent = [word for word in known if word not in last]
        if there and absent:
            right, wrong = rng.choice(there), rng.choice(absent)
            begin, _, end = last.partition(f" {right} ")
            yield _item(" ".join([*before, begin]), [f"{right} {end}", f"{wrong} {end}"], rng)


def summaries(found: Sequence[ast.Module], rng: random.Random) -> Iterator[Item]:
    """What a function does: the first line of its docstring, or that of one of three others of its module."""
    for module in found:
        lines = {}
        for node in (node for node in module.body if isinstance(node, ast.FunctionDef)):
            line, head = (ast.get_docstring(node) or "").partition("\n")[0], ast.unparse(node.args)
            if 4 <= len(line.split()) <= 14 and _PROSE.fullmatch(line) and len(head) <= 80:
                lines[line] = f'def {node.name}({head}):\n    """'
        for line, context in lines.items():
            if len(lines) >= 4:
                yield _item(context, [line, *rng.sample([other for other in lines if other != line], 3)], rng)


def _item(context: str, choices: list[str], rng: random.Random) -> Item:
    """An item whose first choice is right; they are shuffled."""
    shuffled = rng.sample(choices, len(choices))
    return {"context": context, "choices": shuffled, "answer": shuffled.index(choices[0])}


def own_tasks(most: int) -> list[dict[str, Any]]:
    """Configurations for lm-eval of the four tasks, each of at most so many items."""
    datasets, rng, found = importlib.import_module("datasets"), random.Random(0), modules()
    prose = paragraphs(found)
    made = {
        "last_word": list(last_words(prose)),
        "ending": list(endings(prose, rng)),
        "which_word": list(which_word(prose, rng)),
        "summary": list(summaries(found, rng)),
    }

    def task(name: str, items: list[Item]) -> dict[str, Any]:
        rows = datasets.Dataset.from_list(rng.sample(items, min(most, len(items))))
        loglikelihood = {"output_type": "loglikelihood", "doc_to_target": "{{' ' + choices[0]}}"}
        choice = {"output_type": "multiple_choice", "doc_to_choice": "choices", "doc_to_target": "answer"}
        return {
            "task": name,
            "custom_dataset": lambda **_: {"test": rows},
            "test_split": "test",
            "doc_to_text": "context",
            "target_delimiter": "" if name == "summary" else " ",
            "metric_list": [{"metric": "acc"}],
            **(loglikelihood if name == "last_word" else choice),
        }

    return [task(name, items) for name, items in made.items()]


def verdicts(model: Any, tokenizer: Any, tasks: Sequence[Any], *, batch: int, most: int) -> Verdicts:
    lm_eval, huggingface = importlib.import_module("lm_eval"), importlib.import_module("lm_eval.models.huggingface")
    wrapped = huggingface.HFLM(pretrained=model, tokenizer=tokenizer, batch_size=batch)
    manager = importlib.import_module("lm_eval.tasks").TaskManager(include_defaults=isinstance(tasks[0], str))
    found = lm_eval.simple_evaluate(wrapped, tasks=list(tasks), task_manager=manager, limit=most, bootstrap_iters=0)
    return {name: [float(one["acc"]) for one in samples] for name, samples in found["samples"].items()}


def figures(arithmetic: str, found: Verdicts, reference: Verdicts) -> Row:
    """Accuracies in percent; the change of their mean from the reference's, in points; and standard errors."""
    changes = {name: [a - b for a, b in zip(found[name], reference[name], strict=True)] for name in found}

    def error(values: Verdicts) -> float:
        return 100 * math.hypot(*(statistics.stdev(v) / math.sqrt(len(v)) for v in values.values())) / len(values)

    row: Row = {"arithmetic": arithmetic, "items": sum(map(len, found.values()))}
    row |= {name: round(100 * statistics.fmean(values), 2) for name, values in found.items()}
    row["mean"] = round(100 * statistics.fmean(map(statistics.fmean, found.values())), 2)
    row["its_standard_error"] = round(error(found), 2)
    row["change"] = round(100 * statistics.fmean(map(statistics.fmean, changes.values())), 2)
    row["standard_error_of_the_change"] = round(error(changes), 2)
    row["items_that_change"] = sum(value != 0 for values in changes.values() for value in values)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model")
    parser.add_argument("--tasks", help="lm-eval's tasks, in place of those made from this Python")
    parser.add_argument("--items", type=int, default=500, help="most items of a task")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    args = parser.parse_args()
    try:
        importlib.import_module("lm_eval")
    except ModuleNotFoundError:
        parser.error("this needs lm-eval: pip install lm-eval")
    tasks = own_tasks(args.items) if args.tasks is None else args.tasks.split(",")
    tokenizer = AutoTokenizer.from_pretrained(args.model, trust_remote_code=False)
    float32 = {"dtype": torch.float32}
    rings = {f"ring, {bits} weight bits": RemoteConfig(masking="simulate", weight_bits=bits) for bits in (10, 8)}
    arithmetics: dict[str, dict[str, Any]] = {"float32": float32, "bfloat16": {"dtype": torch.bfloat16}}
    arithmetics |= {name: {**float32, "quantization_config": remote} for name, remote in rings.items()}
    found: dict[str, Verdicts] = {}
    for name, how in arithmetics.items():
        model = AutoModelForCausalLM.from_pretrained(args.model, trust_remote_code=False, **how)
        found[name] = verdicts(model.eval(), tokenizer, tasks, batch=args.batch, most=args.items)
        if name in rings:
            backend_of(model).close()
    rows = [figures(name, one, found["float32"]) for name, one in found.items()]
    goals = [
        Goal(f"{row['arithmetic']}: change of the mean, points", abs(figure(row, "change")), at_most=_WITHIN)
        for row in rows
        if row["arithmetic"] in rings
    ]
    show(rows)
    if args.json is not None:
        command = shlex.join(["python", "examples/zero_shot.py", *sys.argv[1:]])
        write(args.json, msgspec.structs.replace(this_run("quality", rows, goals), command=command))


if __name__ == "__main__":
    main()
