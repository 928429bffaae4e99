"""docs/compatibility/families.csv is what a sweep finds.

Here: a sample of the families, and that the table is complete. `make compatibility` tries all and writes the table.
"""

from pathlib import Path

import pytest
from torch import Tensor

from tenant.model.remote_linear import RemoteLayer
from tests.compatibility import families, sweep

# PEFT and transformers give many warnings that do not matter here.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")

SAMPLE = (
    *("qwen3", "gpt2", "mixtral", "bamba", "nomic_bert", "t5", "vit", "clip", "whisper", "llava", "gpt_oss in mxfp4"),
)
ENOUGH = 200


@pytest.mark.parametrize("family", SAMPLE)
def test_a_family_does_what_the_table_says(family: str) -> None:
    result = sweep.attempt(family, families.head(family))
    rows, _ = sweep.committed("families")
    assert [sweep.cells(result)] == [cells for name, _, *cells in rows if name == family], result


def test_the_table_of_families_is_complete() -> None:
    (header, *rows), summary = sweep.committed("families")
    kinds = families.FAMILIES | dict.fromkeys(families.PUBLISHED, "Checkpoints in 8 or 4 bits")
    assert [header, *([name, kind] for name, kind, *_ in rows)] == [sweep.table({})[0], *map(list, kinds.items())]
    works = {name: set("FBH") <= set(stages) for name, _, stages, *_ in rows}
    assert not {"wrong", "not tried"} & {stages for _, _, stages, *_ in rows}
    assert all(works[name] for name in families.PUBLISHED)
    working = sum(works[name] for name in families.FAMILIES)
    assert summary.startswith(f"{working} of {len(families.FAMILIES)} families work")
    assert working >= ENOUGH


def test_a_layer_with_a_wrong_product_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sweep reports a layer whose product is 5 % too large in one layer group."""
    forward = RemoteLayer.forward

    def faulty(self: RemoteLayer, x: Tensor) -> Tensor:
        return forward(self, x) * (1.05 if self.group.index == 2 else 1)

    monkeypatch.setattr(RemoteLayer, "forward", faulty)
    result = sweep.attempt("qwen3", "Qwen3ForCausalLM")
    assert result.status == "wrong", result
    assert "forward" in result.error


def test_a_family_that_takes_too_long_does_not_stop_the_sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep, "_TIME_LIMIT_S", 0.01)
    sweep.sweep([("llama", "LlamaForCausalLM")], tmp_path / "results.jsonl")
    [result] = sweep.read(tmp_path / "results.jsonl").values()
    assert (result.status, result.error) == ("not tried", "more than 0.01 s")


def test_an_interrupted_sweep_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[str] = []

    def attempt(family: str, model: str) -> sweep.Result:
        tried.append(family)
        return sweep.Result(family=family, model=model, status="works")

    monkeypatch.setattr(sweep, "_in_a_process", attempt)
    results = str(tmp_path / "results.jsonl")
    for named in (["llama"], ["llama", "bert"]):
        monkeypatch.setattr("sys.argv", ["sweep", *named, "--results", results])
        sweep.main()
    assert tried == ["llama", "bert"]
