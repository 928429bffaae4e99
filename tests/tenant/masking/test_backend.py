"""Rows on a GPU are copied to the host and back through page-locked memory, with the same bits."""

import pytest
import torch

from tenant.masking.backend import _on_host


def test_tensors_on_the_host_are_not_copied() -> None:
    parts = [torch.randn(3, 4, dtype=torch.float32), torch.randn(2, 4, dtype=torch.bfloat16)]
    assert [near is part for near, part in zip(_on_host(parts), parts, strict=True)] == [True, True]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_copies_between_the_devices_wait_for_each_other() -> None:
    for _ in range(20):
        parts = [torch.randn(rows, 4096, device="cuda", requires_grad=True) for rows in (1, 700)]
        near = _on_host(parts)
        assert all(part.is_pinned() for part in near)
        assert all(torch.equal(here, there.detach().cpu()) for here, there in zip(near, parts, strict=True))
