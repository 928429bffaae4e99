"""Local functions of rows give a row the same bits, whatever other rows are computed with it."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import example, given, settings, strategies as st
from torch import Tensor
from torch.nn import functional as F
from transformers.activations import ACT2FN

from symbiosis_priv import native
from symbiosis_priv.native import linear
from tenant.endpoint.engine.row_blocks import RowBlocks
from tests.builds import switched

needs_library = pytest.mark.skipif(native.library() is None, reason="installed without a C compiler")

_WEIGHT = torch.randn(48, 1536, generator=torch.Generator().manual_seed(0))
FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "linear": lambda x: F.linear(x, _weight(x)),
    "addmm": lambda x: torch.addmm(_weight(x)[:, 0], x.view(-1, x.shape[-1]), _weight(x).t()),
    "tanh": torch.tanh,
    "exp": Tensor.exp,
    **{name: ACT2FN[name] for name in ("silu", "gelu", "gelu_new", "gelu_pytorch_tanh", "quick_gelu")},
}


def _weight(x: Tensor) -> Tensor:
    return _WEIGHT[:, : x.shape[-1]].to(x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", FUNCTIONS)
@settings(max_examples=8)
@example(rows=9, width=193, seed=0)  # a row ends within a vector
@given(
    rows=st.integers(1, 40),
    width=st.one_of(st.integers(1, 333), st.sampled_from([64, 320, 1536])),
    seed=st.integers(0, 9),
)
def test_a_row_has_the_same_bits_alone_and_among_others(
    name: str, dtype: torch.dtype, rows: int, width: int, seed: int
) -> None:
    x = torch.randn(rows, 1, width, generator=torch.Generator().manual_seed(seed)).to(dtype)
    compute = FUNCTIONS[name]

    with RowBlocks():
        together = compute(x)
        alone = torch.cat([compute(row) for row in x.split(1)])
    assert torch.equal(together, alone)
    torch.testing.assert_close(together, compute(x), rtol=0.05, atol=1e-3 if dtype == torch.float32 else 0.1)


@needs_library
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@settings(max_examples=10)
@given(rows=st.integers(1, 11), outputs=st.integers(1, 21), width=st.integers(1, 130), seed=st.integers(0, 9))
def test_the_compiled_linear_has_the_same_bits_with_every_instruction_set(
    dtype: torch.dtype, rows: int, outputs: int, width: int, seed: int
) -> None:
    """And an error of at most one rounding per term, of 2^-24 of the sum of all sizes."""
    generator = torch.Generator().manual_seed(seed)
    x, weight = (torch.randn(count, width, generator=generator).to(dtype) for count in (rows, outputs))
    results = []
    for isa in native.isas():
        with switched(SYMBIOSIS_PRIV_ISA=isa.name.lower()):
            results.append(linear(x, weight))
    assert all(torch.equal(result, results[0]) for result in results)
    exact, sizes = x.double() @ weight.double().t(), x.double().abs() @ weight.double().abs().t()
    rounding = 2**-24 * (width + 1) + (2**-8 if dtype == torch.bfloat16 else 0)
    assert ((results[0] - exact).abs() <= rounding * sizes).all()


def test_no_rows() -> None:
    with RowBlocks():
        assert F.linear(torch.empty(0, 1, 4), torch.ones(3, 4)).shape == (0, 1, 3)
