"""Every tensor states its dtype and device, because transformers and scripts change torch's defaults."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FACTORIES = frozenset(
    (
        *("zeros", "ones", "empty", "full", "tensor", "as_tensor", "scalar_tensor", "arange", "range", "linspace"),
        *("logspace", "eye", "rand", "randn", "randint", "randperm", "normal", "empty_strided", "tril_indices"),
    )
)


def factory_calls(source: str) -> Iterator[ast.Call]:
    """Calls of torch's factories by name, as in `torch.zeros(...)`."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Call(func=ast.Attribute(value=ast.Name(id="torch"), attr=name)) if name in FACTORIES:
                yield node


def undecided(source: str) -> list[str]:
    """Factory calls that leave dtype or device to torch's defaults."""
    return [
        f"line {call.lineno}: {ast.unparse(call)}"
        for call in factory_calls(source)
        if not {"dtype", "device"} <= {keyword.arg for keyword in call.keywords}
    ]


def sources(package: str) -> dict[str, str]:
    return {str(path.relative_to(ROOT)): path.read_text("utf-8") for path in (ROOT / package).rglob("*.py")}


@pytest.mark.parametrize("package", ["symbiosis_priv", "provider", "tenant"])
def test_no_tensor_takes_its_dtype_or_device_from_torchs_defaults(package: str) -> None:
    called = re.compile(rf"\btorch\s*\.\s*({'|'.join(FACTORIES)})\b")  # searching is faster than parsing
    found = {path: undecided(text) for path, text in sources(package).items() if called.search(text)}
    assert {path: calls for path, calls in found.items() if calls} == {}


@pytest.mark.parametrize("package", ["symbiosis_priv", "provider", "tenant"])
def test_factories_are_called_by_their_names(package: str) -> None:
    """`from torch import zeros` would not be found by the test above."""
    for path, text in sources(package).items():
        for names in re.findall(r"\bfrom\s+torch\s+import\b(\s*\([^)]*|.*)", text):
            assert not FACTORIES & set(re.findall(r"\w+", names)), path


def test_undecided_calls_are_found() -> None:
    assert len(undecided("x = torch.zeros(3)\ny = torch.empty(3, dtype=torch.int32)")) == 2
    assert undecided("x = torch.zeros(3, dtype=torch.int32, device='cpu')") == []
