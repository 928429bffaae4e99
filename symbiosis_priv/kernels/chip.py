"""The facts about a GPU that the code asks for, in one place. Tests put a table of chips in place of `chip_of`."""

import functools
from dataclasses import dataclass

import torch

_MATRIX_UNITS = ("gfx908", "gfx90a", "gfx94", "gfx95", "gfx11", "gfx12")  # AMD's, for int8 and float16


@dataclass(frozen=True)
class Chip:
    """A GPU.

    Args:
        architecture: "sm_90", or "gfx942" with ROCm, whose compute capability says nothing.
        memory, shared: bytes, in all, and those that one program may have of a processor's shared memory.
        lanes: threads of a warp.
    """

    name: str
    architecture: str
    processors: int
    memory: int
    shared: int
    lanes: int = 32

    @property
    def _capability(self) -> int:
        """NVIDIA's, such as 90 for 9.0; 0 for others."""
        return int(self.architecture.removeprefix("sm_")) if self.architecture.startswith("sm_") else 0

    @property
    def multiplies_integers(self) -> bool:
        """True if Triton compiles int8 and float16 products for matrix units."""
        return self._capability >= 80 or self.architecture.startswith(_MATRIX_UNITS)

    @property
    def prefers_floats(self) -> bool:
        """True if exact products take less time on float16 units: Triton 3.7 sends int8 to slow instructions on B200,
        B300 and their relatives, and B300 has few int8 units."""
        return 100 <= self._capability < 120

    @property
    def asynchronous(self) -> bool:
        """True if matrix units read shared memory while the program goes on, which takes one more buffer."""
        return 90 <= self._capability < 120


def free_memory(device: torch.device) -> int:
    """Bytes of a CUDA device that no program uses. Makes this process's context there, which takes half a GiB."""
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(device)[0]


@functools.cache
def chip_of(device: torch.device) -> Chip | None:
    """The chip of a CUDA or ROCm device; None for a CPU, and if there is no such device."""
    if device.type != "cuda" or (device.index or 0) >= torch.cuda.device_count():
        return None
    found = torch.cuda.get_device_properties(device)
    amd = torch.version.hip is not None
    return Chip(
        name=found.name,
        architecture=found.gcnArchName.partition(":")[0] if amd else f"sm_{found.major}{found.minor}",
        processors=found.multi_processor_count,
        memory=found.total_memory,
        # ROCm has no larger size to opt in to
        shared=found.shared_memory_per_block if amd else found.shared_memory_per_block_optin,  # type: ignore[attr-defined]
        lanes=found.warp_size,
    )
