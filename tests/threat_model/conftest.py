"""One quick report for all tests, made by the command itself; and its lab, for tests that need their own run."""

import contextlib
import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ONE_REPORT
from threat_model import cli, suite
from threat_model.evidence.schemes import AttackedScheme
from threat_model.lab import Lab, Recording, Workload
from threat_model.suite import Suite

Recorded = Callable[[AttackedScheme, Workload], Recording]


@pytest.fixture(scope="session")
def quick_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The command's HTML file."""
    return tmp_path_factory.mktemp("report") / "report.html"


@pytest.fixture(scope="session")
def quick(quick_page: Path, lab: Lab) -> Suite:
    """`symbiosis-priv threat-model --quick` in the tests' lab. If a verdict is not the promised one, all tests fail."""
    made: list[Suite] = []
    real = suite.run_suite

    def keep(*args: Any, **kwargs: Any) -> Suite:
        made.append(real(*args, **kwargs))
        return made[0]

    said = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stderr(said):
        patch.setattr(suite, "run_suite", keep)
        patch.setattr("threat_model.lab.Lab", lambda folder: contextlib.nullcontext(lab))
        cli.threat_model(html=quick_page, quick=True)
    assert "attacking every scheme: " in said.getvalue()
    assert "Warning" not in said.getvalue()
    return made[0]


@pytest.fixture(scope="session")
def lab(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """Four providers and a base model."""
    items = [one for one in request.session.items if isinstance(one, pytest.Function) and "lab" in one.fixturenames]
    assert {one.nodeid.partition("::")[0] for one in items} <= {*ONE_REPORT}, "workers would make a report each"
    with Lab(tmp_path_factory.mktemp("lab")) as running:
        yield running


@pytest.fixture(scope="session")
def recorded(lab: Lab) -> Recorded:
    """`lab.record`, once for a scheme and a workload; tests must not change a recording."""
    made: dict[tuple[str, Workload], Recording] = {}

    def record(scheme: AttackedScheme, workload: Workload) -> Recording:
        if (scheme.name, workload) not in made:
            made[scheme.name, workload] = lab.record(scheme, workload)
        return made[scheme.name, workload]

    return record
