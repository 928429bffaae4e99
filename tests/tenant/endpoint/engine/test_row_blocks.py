"""Local functions of rows give a row the same bits in any company."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F
from transformers.activations import ACT2FN

from tenant.endpoint.engine.row_blocks import RowBlocks

_WEIGHT = torch.randn(48, 333, generator=torch.Generator().manual_seed(0))
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
@given(rows=st.integers(1, 40), width=st.integers(1, 333), seed=st.integers(0, 9))
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


def test_no_rows() -> None:
    with RowBlocks():
        assert F.linear(torch.empty(0, 1, 4), torch.ones(3, 4)).shape == (0, 1, 3)
