"""Memory that the ranks share: the rows of a product, and its result.

Every rank reads the rows where rank 0 has put them, and writes its own columns of the result. It is a file without a
name, which ends with the last rank. On a machine with GPUs every rank locks it, and copies columns with one call.
"""

import contextlib
import ctypes
import functools
import mmap
import os
from typing import Any, Self

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from provider import logs

log = logs.EventLog(__name__)

_LEAD = 0
_BY_ADDRESS = 4  # cudaMemcpyDefault


class SharedRows:
    """Memory for `entries` entries of rows, and for as many of a result, in the file `file`, which every rank maps."""

    def __init__(self, file: int, entries: int, device: torch.device) -> None:
        self._entries, self._device = entries, device
        self._mapped = mmap.mmap(file, 8 * entries)
        whole = torch.from_numpy(np.frombuffer(self._mapped, dtype=np.int32))
        self._rows: Tensor = whole[:entries]
        self._result: Tensor = whole[entries:]
        if device.type == "cuda":
            status = torch.cuda.cudart().cudaHostRegister(whole.data_ptr(), whole.nbytes, 0)
            if int(status):
                log.warning("not_page_locked", reason=f"cudaHostRegister returns {int(status)}")
                with contextlib.suppress(RuntimeError):  # the next program that torch starts would raise CUDA's error
                    torch.ones(1, dtype=torch.int32, device=device)

    @classmethod
    def of(cls, entries: int, device: torch.device, group: Any) -> Self:
        """Share memory of rank 0 with all ranks, which call this together. `group`: for tensors on the CPU."""
        leads = dist.get_rank() == _LEAD
        file = os.memfd_create("rows") if leads else -1
        place = torch.tensor([os.getpid(), file], dtype=torch.int64, device="cpu")
        dist.broadcast(place, _LEAD, group=group)
        pid, number = place.tolist()
        if leads:
            os.ftruncate(file, 8 * entries)
        else:
            file = os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR | os.O_CLOEXEC)
        dist.barrier(group)  # rank 0 has made it long enough, and does not close it before
        try:
            return cls(file, entries, device)
        finally:
            os.close(file)

    def chunk(self, inputs: int, outputs: int) -> int:
        """The number of rows for which there is memory."""
        return self._entries // max(inputs, outputs)

    def put(self, rows: Tensor) -> None:
        self.rows(*rows.shape).copy_(rows)

    def rows(self, count: int, width: int) -> Tensor:
        """The chunk of rows, on the CPU."""
        return self._rows[: count * width].view(count, width)

    def result(self, count: int, width: int) -> Tensor:
        """The chunk of the result, on the CPU."""
        return self._result[: count * width].view(count, width)

    def take(self, count: int, width: int, columns: slice) -> Tensor:
        """Columns of the rows, on this rank's device."""
        source = self.rows(count, width)[:, columns]
        if self._device.type == "cpu":
            return source.contiguous()
        near = torch.empty(source.shape, dtype=torch.int32, device=self._device)
        _copy(near, source, self._device)
        return near

    def write(self, product: Tensor, columns: slice, *, width: int) -> None:
        """Write a product on this rank's device to columns of the result, and wait until it is there."""
        _copy(self.result(len(product), width)[:, columns], product, self._device)


def _copy(target: Tensor, source: Tensor, device: torch.device) -> None:
    """Copy a matrix between host and device, where its rows may lie apart, and wait until it is there. (torch would
    copy such rows on the CPU first.)"""
    if (target.is_cpu and source.is_cpu) or not source.numel() or (copy := _copy_2d()) is None:
        target.copy_(source)
        return
    stream, pitches = torch.cuda.current_stream(device), (4 * target.stride(0), 4 * source.stride(0))
    status = copy(
        *(target.data_ptr(), pitches[0], source.data_ptr(), pitches[1]),
        *(4 * source.shape[1], len(source), _BY_ADDRESS, stream.cuda_stream),
    )
    if status:
        raise RuntimeError(f"cudaMemcpy2DAsync returns {status}")
    stream.synchronize()


@functools.cache
def _copy_2d() -> Any:
    """CUDA's or HIP's copy of columns; None where torch has loaded no such function."""
    loaded = ctypes.CDLL(None)
    copy = getattr(loaded, "cudaMemcpy2DAsync", None) or getattr(loaded, "hipMemcpy2DAsync", None)
    if copy is not None:
        size, pointer = ctypes.c_size_t, ctypes.c_void_p
        copy.argtypes = pointer, size, pointer, size, size, size, ctypes.c_int, pointer
    return copy
