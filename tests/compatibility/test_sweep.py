"""docs/compatibility/families.csv is what a run finds.

By default: a sample of the families, and that the table is complete. `make compatibility` tries all, and writes the
table.
"""

from collections.abc import Iterator
from importlib.metadata import version

import pytest
from torch import Tensor

from tenant.model.remote_linear import RemoteLayer
from tests.compatibility import families
from tests.compatibility.tables import Rows, committed, write
from tests.compatibility.trial import attempt

# PEFT and transformers give many warnings that do not matter here.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")

KINDS = families.FAMILIES | dict.fromkeys(families.PUBLISHED, "Checkpoints in 8 or 4 bits")
ENOUGH = 200


def rows(found: dict[str, list[str]]) -> Rows:
    header = ["family", "kind", "stages", "offloaded", "what stays, the largest first"]
    return [header, *([name, kind, *found.get(name, ["not tried", "", ""])] for name, kind in KINDS.items())]


def summary(rows: Rows) -> str:
    working = sum(name in families.FAMILIES and set("FBH") <= set(stages) for name, _, stages, *_ in rows)
    libraries = ", ".join(f"{name} {version(name).partition('+')[0]}" for name in ("transformers", "peft", "torch"))
    return f"{working} of {len(families.FAMILIES)} families work ({libraries}).\n"


@pytest.fixture(scope="module")
def found(pytestconfig: pytest.Config) -> Iterator[dict[str, list[str]]]:
    """The results of this run and of earlier runs. At the end they are written if an option says so."""
    table = {name: cells for name, _, *cells in committed("families")[0][1:]}
    yield table
    if pytestconfig.getoption("compatibility") == "write":
        write("families", new := rows(table), summary(new))


def test_a_family_does_what_the_table_says(
    family: str, found: dict[str, list[str]], pytestconfig: pytest.Config
) -> None:
    cells = attempt(family, families.head(family))
    if pytestconfig.getoption("compatibility") != "write":
        assert cells == found[family]
    found[family] = cells


def test_the_table_of_families_is_complete() -> None:
    (header, *cells), text = committed("families")
    kept = {name: rest for name, _, *rest in cells}
    assert (rows(kept), summary(cells)) == ([header, *cells], text)
    works = {name: set("FBH") <= set(stages) for name, (stages, *_) in kept.items()}
    assert not {"wrong", "not tried"} & {stages for stages, *_ in kept.values()}
    assert all(works[name] for name in families.PUBLISHED)
    assert sum(works[name] for name in families.FAMILIES) >= ENOUGH


def test_a_layer_with_a_wrong_product_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sweep reports a layer whose product is 5 % too large in one layer group."""
    forward = RemoteLayer.forward

    def faulty(self: RemoteLayer, x: Tensor) -> Tensor:
        return forward(self, x) * (1.05 if self.group.index == 2 else 1)

    monkeypatch.setattr(RemoteLayer, "forward", faulty)
    status, _, error = attempt("qwen3", "Qwen3ForCausalLM")
    assert status == "wrong"
    assert "forward" in error
