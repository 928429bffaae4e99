"""Limits the time that an adapter folder's regular expressions take, and the memory that its stated sizes take.

PEFT matches the patterns of adapter_config.json against every module name. PEFT also builds an adapter of the sizes
that the configuration states before it reads the tensors. Another party may have written the patterns and sizes.
PiSSA and OLoRA factorise each base weight at their start; the model's size bounds that time.
"""

import ctypes
import json
import math
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from peft import PeftConfig
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers.pytorch_utils import Conv1D

from symbiosis_priv.checkpoints.discovery.linears import widths
from symbiosis_priv.errors import CheckpointError

_PATIENCE_S = 5.0  # an interpreter starts in 20 ms, and a usual pattern takes a few ms more
_MEMORY = 256 << 20  # address space in bytes of the process that matches patterns
_MATCH = """
import json, re, resource, sys
resource.setrlimit(resource.RLIMIT_AS, (int(sys.argv[1]),) * 2)
pattern, names = json.load(sys.stdin)
json.dump([name for name in names if re.fullmatch(pattern, name)], sys.stdout)
"""
_NOTHING = "(?!)"
_PATTERNS = ("target_modules", "exclude_modules", "feedforward_modules")  # a string value is a regular expression
_SPARE_BYTES = 128 << 20  # for tensors that a method makes from a seed and shares between layers (VeRA)
_MAX_ITERATIONS = 64  # iterations of PiSSA's fast initialisation; PEFT recommends 4 to 16
STARTS_FROM_WEIGHT = ("pissa", "olora", "corda", "mica")
"""The first letters of LoRA's initialisations that read the base weight."""
_COPIES = 4  # PEFT may hold several copies of the adapter's tensors, in a wider dtype than on disk


def needs_weights(settings: Mapping[str, Any]) -> bool:
    """Return whether PEFT needs the base model's weights to make an adapter with these settings."""
    return str(settings.get("init_lora_weights")).lower().startswith(STARTS_FROM_WEIGHT)


def bounded_config(config: PeftConfig, model: nn.Module, *, folder: Path) -> PeftConfig:
    """Replace the regular expressions of an adapter's configuration by the module names that they match. Returns
    `config`. Raises `CheckpointError`: a pattern is invalid, matches no module, or takes too much time or memory; the
    adapter's initialisation takes too many iterations; or the adapter repeats layers."""
    names = [name for name, _ in model.named_modules()]
    if getattr(config, "layer_replication", None):
        raise CheckpointError(
            f"layer_replication in {folder / 'adapter_config.json'} repeats layers of the model; use an adapter without"
        )
    iterations = re.fullmatch(r"pissa_niter_(\d+)", str(getattr(config, "init_lora_weights", "")))
    if iterations and (len(iterations[1]) > 3 or int(iterations[1]) > _MAX_ITERATIONS):
        raise CheckpointError(
            f"init_lora_weights in {folder / 'adapter_config.json'} asks for more than {_MAX_ITERATIONS} iterations; "
            f"write pissa_niter_16"
        )
    for field in _PATTERNS:
        pattern = getattr(config, field, None)
        if isinstance(pattern, str) and pattern.lower() != "all-linear":
            what = f"{field} in {folder / 'adapter_config.json'}"
            try:  # in a child process with limited time and memory
                done = subprocess.run(
                    [sys.executable, "-I", "-S", "-c", _MATCH, str(_MEMORY)],
                    input=json.dumps([pattern, names]),
                    capture_output=True,
                    text=True,
                    timeout=_PATIENCE_S,
                    check=True,
                )
                found: list[str] = json.loads(done.stdout)
            except (subprocess.SubprocessError, ValueError) as error:
                raise CheckpointError(
                    f"{what} is not a regular expression that can be matched in {_PATIENCE_S:g} s; write a list of "
                    f"module names"
                ) from error
            if not found and field != "feedforward_modules":
                raise CheckpointError(f"{what} matches no module of this model; load the same base model")
            setattr(config, field, "|".join(map(re.escape, found)) or _NOTHING)
    return config


class MemoryLimit(TorchDispatchMode):
    """Context manager that limits the memory of tensors made from stated sizes, such as `torch.empty(rows, columns)`.
    The limit follows from the size of the adapter's file and of the model's largest layer. Operations that take tensors
    are not counted, because the size of their result follows from tensors that exist. `model`: the base model. Some
    methods index all weights of a layer (FourierFT), so its largest layer counts. Raises `CheckpointError`: an
    operation would exceed the limit; its memory was not allocated."""

    def __init__(self, model: nn.Module, file: Path) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        linears = (module for module in model.modules() if isinstance(module, (nn.Linear, Conv1D)))
        largest = max((math.prod(widths(module)) for module in linears), default=0)
        self._limit = _SPARE_BYTES + largest * torch.int64.itemsize + _COPIES * file.stat().st_size
        self._file = file
        self._live: list[tuple[StorageWeakRef, int]] = []
        self._held = 0  # bytes of `_live`, with those freed since it was last looked through
        self._made = 0  # bytes since freed memory was returned last
        self._sizes: dict[str, int] = {}  # adapters make tensors of the same sizes in every layer

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        to = kwargs.get("device")
        # most operations take a tensor first, and this test is faster than flattening the arguments
        sized = bool(args) and isinstance(args[0], Tensor) and not args[0].is_meta
        if not sized:  # a copy of a tensor from the meta device takes memory that the tensor does not take
            tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
            sized = any(to is None or not tensor.is_meta for tensor in tensors)
        if sized or (to is not None and torch.device(to).type == "meta"):
            return func(*args, **kwargs)
        call = repr((func, args, kwargs))
        if call not in self._sizes:
            self._sizes[call] = _bytes_of(func, args, kwargs)
        size = self._sizes[call]
        if self._held + size > self._limit:
            self._live = [(storage, size) for storage, size in self._live if not storage.expired()]
            self._held = sum(size for _, size in self._live)
        if self._held + size > self._limit:
            raise CheckpointError(
                f"{self._file.parent / 'adapter_config.json'} states sizes that do not fit {self._file.name} "
                f"({self._file.stat().st_size:,} bytes); fetch the adapter again"
            )
        self._made += size
        if self._made > self._limit:
            self._made = size
            # PEFT makes many tensors and drops each one, and glibc's allocator keeps most of them: gigabytes
            if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
                trim(0)
        made = func(*args, **kwargs)
        if size and isinstance(made, Tensor):
            self._live.append((StorageWeakRef(made.untyped_storage()), size))
            self._held += size
        return made


def _bytes_of(func: Any, args: Any, kwargs: dict[str, Any]) -> int:
    """Return the bytes of an operation's results. Runs the operation on the meta device, which allocates nothing."""
    without = {name: value for name, value in kwargs.items() if name not in ("generator", "pin_memory")}
    try:
        made = func(*args, **without | {"device": torch.device("meta")})
    except Exception:  # the operation takes no `device`, so it makes no tensor from sizes
        return 0
    return sum(math.prod(leaf.shape) * leaf.itemsize for leaf in tree_leaves(made))
