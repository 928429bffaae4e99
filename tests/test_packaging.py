"""The distribution: public names, types, one version, declared dependencies, and the direction of imports."""

import ast
import functools
import importlib
import re
import sys
import tomllib
from graphlib import TopologicalSorter
from importlib.metadata import version
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import symbiosis_priv
from symbiosis_priv import errors
from tests.sizes import choices

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PACKAGES = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
MAY_IMPORT = {
    "symbiosis_priv": set(),
    "provider": {"symbiosis_priv"},
    "tenant": {"symbiosis_priv"},
    "threat_model": {"symbiosis_priv", "provider", "tenant"},
}
EXPORTS = {
    "symbiosis_priv": set(),
    "provider": set(),
    "tenant": {
        *("BitFitConfig", "BottleneckConfig", "DiffPruningConfig", "MaskBertConfig"),
        *("RemoteConfig", "Tasks", "backend_of", "batched_rollouts", "compute_all_logits"),
        "rounded_model",
    },
    "threat_model": set(),
}


@functools.cache  # parsing takes longer than everything else here
def statements(path: Path) -> list[ast.Import | ast.ImportFrom]:
    """The imports of a module, at its top, in a function or only for types."""
    found: list[ast.AST] = [ast.parse(path.read_text(encoding="utf-8"))]
    for node in found:  # statements that contain statements; expressions contain none
        for name in ("body", "orelse", "finalbody", "handlers", "cases"):
            found += getattr(node, name, ())
    return [node for node in found if isinstance(node, ast.Import | ast.ImportFrom)]


def imported(package: str) -> set[str]:
    """Top-level names of everything that a package imports, anywhere in its code."""
    names: set[str] = set()
    for path in (ROOT / package).rglob("*.py"):
        for node in statements(path):
            if isinstance(node, ast.Import):
                names.update(alias.name.partition(".")[0] for alias in node.names)
            elif not node.level:
                names.add(str(node.module).partition(".")[0])
    return names


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_imports_only_what_it_may(package: str) -> None:
    assert imported(package) & set(PACKAGES) - {package} <= MAY_IMPORT[package]


def modules_it_imports(path: Path, modules: dict[str, Path]) -> set[str]:
    """The modules of this project that one imports."""
    names: set[str] = set()
    for node in statements(path):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        else:
            within = {f"{node.module}.{alias.name}" for alias in node.names}
            names.update(within & modules.keys() or {str(node.module)})
    return names & modules.keys()


@pytest.mark.parametrize("parts", [2, 3, 9], ids=["folders of a package", "folders in folders", "modules"])
def test_there_is_no_import_circle(parts: int) -> None:
    """Also counting imports inside functions. So each module can be read and tested after those that it imports."""
    modules = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
    }

    def place(name: str) -> str:
        return ".".join(name.split(".")[:parts])

    imports: dict[str, set[str]] = {place(name): set() for name in modules}
    for name, path in modules.items():
        imports[place(name)] |= {place(other) for other in modules_it_imports(path, modules)} - {place(name)}
    order = TopologicalSorter(imports)
    assert len(tuple(order.static_order())) == len(imports)  # CycleError names a circle


def layers() -> dict[str, list[str]]:
    """By package: its folders and modules in order of imports, as CONTRIBUTING lists them."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    lines = text.partition("```layers\n")[2].partition("```")[0].splitlines()
    return {package: names for package, *names in map(str.split, lines)}


def side_by_side(folder: Path) -> set[str]:
    """Names of the modules and folders in a folder, except those that every package has."""
    modules = {path.stem for path in folder.glob("*.py")} - {"__init__"}
    return modules | {path.name for path in folder.iterdir() if any(path.glob("*.py"))}


@pytest.mark.parametrize("package", PACKAGES)
def test_no_import_runs_upward(package: str) -> None:
    """A folder imports only folders that stand before it in CONTRIBUTING's list."""
    order = layers()[package]
    assert sorted(order) == sorted(side_by_side(ROOT / package))
    modules = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
        for path in (ROOT / package).rglob("*.py")
    }
    upward = [
        f"{name} -> {other}"
        for name, path in modules.items()
        for other in modules_it_imports(path, modules)
        if "." in name and "." in other and order.index(name.split(".")[1]) < order.index(other.split(".")[1])
    ]
    assert upward == []


def test_the_lock_has_a_hash_for_every_pinned_package_and_no_host() -> None:
    """`make lock` was run after pyproject.toml or constraints.txt changed."""
    text = {name: (ROOT / "locks" / f"{name}.txt").read_text(encoding="utf-8") for name in LOCKS}
    assert "//" not in "".join(text.values())
    locked: dict[str, str] = {}
    whole = "".join(text[name] for name in LOCKS if name != "release")
    for package in re.findall(r"^\S.*\n(?: .*\n)*", whole, re.MULTILINE):
        name, version = re.match(r"([\w.-]+)==([^ ;]+)", package).groups()  # type: ignore[union-attr]
        assert "--hash=sha256:" in package, name
        locked[canonicalize_name(name)] = version
    pins = re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE)
    assert {canonicalize_name(name): version for name, version in pins}.items() <= locked.items()
    wanted = [*PROJECT["project"]["dependencies"], *PROJECT["build-system"]["requires"]]
    wanted += [each for group in PROJECT["dependency-groups"].values() for each in group if isinstance(each, str)]
    for requirement in map(Requirement, wanted):
        assert requirement.specifier.contains(locked[canonicalize_name(requirement.name)]), requirement


LOCKS = ("venv", "torch", "cuda", "release")


def test_folders_are_small_and_documented() -> None:
    """At most 16 modules and folders in each folder, and every folder has a docstring."""
    folders = {path.parent for package in PACKAGES for path in (ROOT / package).rglob("*.py")}
    assert [folder for folder in folders if len(side_by_side(folder)) > 16] == []
    assert all(ast.get_docstring(ast.parse((folder / "__init__.py").read_text(encoding="utf-8"))) for folder in folders)


BUDGETS = {"symbiosis_priv": 11_884, "provider": 7_537, "tenant": 25_778, "threat_model": 5_971, "tests": 41_994}
"""Lines of each package. Growth is decided: a change that needs more lines frees them elsewhere in its package, or
raises the budget with the reason in its commit message. A change that frees many lines lowers the budget."""


@pytest.mark.parametrize("package", BUDGETS)
def test_a_package_stays_within_its_budget(package: str) -> None:
    lines = sum(path.read_text(encoding="utf-8").count("\n") for path in (ROOT / package).rglob("*.py"))
    assert lines <= BUDGETS[package], "python -m tests.sizes prints what is large"
    assert lines > 0.97 * BUDGETS[package], "lower the budget"


CHOICES = {
    "options of all commands": 238,
    "different options": 150,
    "keys of provider.toml": 40,
    "keys of federation.toml": 22,
    "words, the changelog aside": 23_539,
}
"""What a reader has to choose from and to read. A key or an option has a person who sets it."""


def test_choices_and_documents_stay_within_their_budgets() -> None:
    counts = choices()
    assert counts.keys() == CHOICES.keys()
    above = {name: count for name, count in counts.items() if count > CHOICES[name]}
    assert above == {}, "python -m tests.sizes prints them"
    below = {name: count for name, count in counts.items() if count < 0.97 * CHOICES[name]}
    assert below == {}, "lower the budget"


def test_the_trust_core_can_be_read_in_one_sitting() -> None:
    """`tenant.core` holds what privacy and integrity depend on, and nothing else."""
    modules = [path.read_text(encoding="utf-8") for path in (ROOT / "tenant" / "core").glob("*.py")]
    assert sum(len(text.splitlines()) for text in modules) <= 1200


NO_IO = {"asyncio", "concurrent", "http", "queue", "select", "selectors", "socket", "ssl", "threading", "time", "zmq"}
NOT_ENTERED = {"federation", "federation.parties", "native", "arithmetic.passes", "kernels", "system.files"}
"""Modules of `symbiosis_priv` with data and arithmetic for the trust core, and with files or threads for others."""


def test_the_trust_core_has_no_socket_thread_or_clock() -> None:
    """Neither itself nor through a module that it imports when it runs. Locks guard its counters."""
    paths = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    modules = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in paths}
    todo, seen = [name for name in modules if name.startswith("tenant.core.")], set[str]()
    while todo:
        seen.add(name := todo.pop())
        text = modules[name].read_text(encoding="utf-8")
        for_types = text.partition("\nif TYPE_CHECKING:\n")[2].partition("\n\n")[0]
        for node in ast.parse(text.replace(for_types, "    pass") if for_types else text).body:
            if isinstance(node, ast.Import | ast.ImportFrom) and ast.unparse(node) != "from threading import Lock":
                names = {alias.name for alias in node.names}
                origins = names if isinstance(node, ast.Import) else {str(node.module)}
                assert NO_IO.isdisjoint(origin.partition(".")[0] for origin in origins), f"{name}: {ast.unparse(node)}"
                found = (origins | {f"{origin}.{own}" for origin in origins for own in names}) & modules.keys()
                todo += [o for o in found - seen if o.removeprefix("symbiosis_priv.") not in NOT_ENTERED]


def test_every_import_is_a_declared_dependency() -> None:
    extras = PROJECT["project"]["optional-dependencies"]
    lines = [
        *PROJECT["project"]["dependencies"],
        *extras["gpu"],
        *extras["serve"],
        *extras["tinker"],
        *extras["finetune"],
    ]
    declared = {re.split(r"[^\w-]", line)[0].replace("-", "_") for line in lines}
    foreign = set().union(*map(imported, PACKAGES)) - set(PACKAGES) - sys.stdlib_module_names
    packages = {"zmq": "pyzmq", "PIL": "pillow"}
    assert {packages.get(name, name) for name in foreign} <= declared


@pytest.mark.parametrize("package", PACKAGES)
def test_public_names(package: str) -> None:
    module = importlib.import_module(package)
    submodules = {path.stem for path in (ROOT / package).iterdir()}
    public = getattr(module, "__all__", [name for name in vars(module) if not name.startswith("_")])
    assert set(public) - submodules == EXPORTS[package]
    assert (ROOT / package / "py.typed").is_file()


def test_the_version_has_one_source() -> None:
    assert "version" in PROJECT["project"]["dynamic"]
    assert version("symbiosis-priv") == symbiosis_priv.__version__


def test_the_error_tree_is_complete() -> None:
    defined = {name for name, value in vars(errors).items() if isinstance(value, type)}
    assert all(issubclass(getattr(errors, name), errors.SymbiosisError) for name in defined)
