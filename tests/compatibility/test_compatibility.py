"""docs/compatibility/methods.csv equals the result of a run.

By default: every method on a Llama (`nn.Linear`), those that adapt linears on a GPT-2 (`Conv1D`), and LoRA everywhere.
`make compatibility` tries every pair, which takes some minutes, and writes the table.
"""

from collections.abc import Callable, Iterator
from typing import Any

import peft
import pytest
import torch
import transformers
from peft import PeftModel
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING
from safetensors.torch import load_file, save_file

from tenant.model.offloaded import OffloadedConv1DWeight, OffloadedWeight
from tests.compatibility.conftest import ARCHITECTURES, HOME, METHODS, NOT_TRIED, close, plain_logits
from tests.compatibility.tables import DOCUMENT, Rows, committed, write

# PEFT's methods log many warnings that do not matter here.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")

Table = dict[tuple[str, str], str]


def rows(found: Table) -> Rows:
    """A row for each method, a column for each architecture."""
    names = [*ARCHITECTURES]
    cells = [[m, *(found.get((name, m), "not tried") for name in names)] for m in METHODS]
    return [["method", *names], *cells]


def summary(rows: Rows) -> str:
    """Which methods work on an architecture, and which on none."""
    works = {method: any("F" in cell for cell in cells) for method, *cells in rows[1:]}
    libraries = ", ".join(f"{x.__name__} {x.__version__.partition('+')[0]}" for x in (peft, transformers, torch))
    lines = [f"{len(works)} methods on {len(rows[0]) - 1} architectures ({libraries}).", ""]
    for title, group in (("Work on at least one", True), ("Refused by name", False)):
        lines.append(f"* **{title}**: {'; '.join(method for method in works if works[method] is group)}.")
    return "\n".join(lines) + "\n"


def parse(rows: Rows) -> Table:
    header, *lines = rows
    return {(name, m): cell for m, *cells in lines for name, cell in zip(header[1:], cells, strict=True)}


@pytest.fixture(scope="module")
def found(pytestconfig: pytest.Config) -> Iterator[Table]:
    """The results of this run and of earlier runs. At the end they are written if an option says so."""
    table = parse(committed("methods")[0])
    yield table
    if pytestconfig.getoption("compatibility") == "write":
        new = rows(table)
        write("methods", new, summary(new))


def test_each_pair_gives_the_result_in_the_table(
    new_pair: Callable[[str, str], Any], names: tuple[str, str], found: Table, pytestconfig: pytest.Config
) -> None:
    cell = new_pair(*names).found()
    if pytestconfig.getoption("compatibility") != "write":
        assert cell == found[names]
    found[names] = cell


def test_the_table_is_complete() -> None:
    """The table contains every PEFT method and architecture: a method that PEFT adds must be tried."""
    kinds = {options["kind"] for options in METHODS.values()} | set(NOT_TRIED)
    assert kinds == {kind.name for kind in PEFT_TYPE_TO_CONFIG_MAPPING}
    old, text = committed("methods")
    table = parse(old)
    assert (old, text) == (rows(table), summary(old))
    assert "not tried" not in table.values()
    assert all(set("FBH") <= set(table[name, "LoRA"]) for name in ARCHITECTURES)
    for reason in NOT_TRIED.values():
        assert reason in DOCUMENT.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("weight", "models"), [(OffloadedWeight, ("Llama", "Falcon", "BERT")), (OffloadedConv1DWeight, ("GPT-2",))]
)
def test_refusals_name_what_works(weight: type[OffloadedWeight], models: tuple[str, ...]) -> None:
    """An error names the adapters that work on such a layer in the table, with and without a bias."""
    table = parse(committed("methods")[0])
    working = {
        PEFT_TYPE_TO_CONFIG_MAPPING[peft.PeftType[options["kind"]]].__name__.removesuffix("Config")
        for method, options in METHODS.items()
        if "target_modules" in options and all(set("FBH") <= set(table[model, method]) for model in models)
    }
    assert set(weight.adapters) == working


def test_one_ignored_layer_would_be_found(new_pair: Callable[[str, str], Any]) -> None:
    """The tolerance is smaller than the effect of the adapter of any single layer, so a model that ignores one
    fails."""
    pair = new_pair("Llama", "LoRA")
    split = pair.attempt(split=True)
    assert HOME in split.stages
    saved = pair.folder / "split" / "adapter_model.safetensors"
    tensors = load_file(saved)
    effect = (split.logits - plain_logits(pair.architecture, pair.checkpoint)).abs().max()
    for name in [name for name in tensors if "lora_B" in name]:
        save_file(tensors | {name: torch.zeros_like(tensors[name])}, saved)
        home: Any = PeftModel.from_pretrained(pair.base(split=False), str(saved.parent))
        assert not close(split.logits, pair.logits(home), scale=effect), name
