"""Bounds on what an adapter folder can cost: time in regular expressions, and memory for numbers in its configuration.

PEFT matches the patterns of adapter_config.json against every module name, and builds an adapter of the sizes that the
configuration states before it reads the tensors. Both are inputs of another party.
"""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from peft import PeftConfig
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from symbiosis_priv.checkpoints.layer_discovery import is_linear, widths
from symbiosis_priv.errors import CheckpointError

_PATIENCE_S = 5.0  # a Python interpreter takes 20 ms to start, and an honest pattern a few more
_MEMORY = 256 << 20  # bytes, of the process that matches
_MATCH = """
import json, re, resource, sys
resource.setrlimit(resource.RLIMIT_AS, (int(sys.argv[1]),) * 2)
pattern, names = json.load(sys.stdin)
json.dump([name for name in names if re.fullmatch(pattern, name)], sys.stdout)
"""
_NOTHING = "(?!)"
_PATTERNS = ("target_modules", "exclude_modules", "feedforward_modules")  # regular expressions, if they are strings
_SPARE_BYTES = 128 << 20  # what methods share between layers and make from a seed (VeRA's projections, for one)
_COPIES = 4  # of the adapter's tensors, each perhaps in a wider dtype than on disk


def bounded_config(config: PeftConfig, names: Sequence[str], *, folder: Path) -> PeftConfig:
    """The configuration with its regular expressions replaced by the module names that they match.

    Args:
        config: the adapter's; changed in place.
        names: of the model's modules.
        folder: for messages.

    Raises:
        CheckpointError: a pattern is invalid, or takes too long to match.
    """
    for field in _PATTERNS:
        pattern = getattr(config, field, None)
        if isinstance(pattern, str) and pattern.lower() != "all-linear":
            what = f"{field} in {folder / 'adapter_config.json'}"
            if getattr(config, "layer_replication", None):
                raise CheckpointError(f"{what} is a pattern, beside layer_replication; write a list of module names")
            found = _matching(pattern, names, what=what)
            if not found and field != "feedforward_modules":
                raise CheckpointError(f"{what} matches no module of this model; the same base model?")
            setattr(config, field, "|".join(map(re.escape, found)) or _NOTHING)
    return config


def _matching(pattern: str, names: Sequence[str], *, what: str) -> list[str]:
    """The names that a pattern matches, found by a process that is killed if it takes too much time or memory."""
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-S", "-c", _MATCH, str(_MEMORY)],
            input=json.dumps([pattern, list(names)]),
            capture_output=True,
            text=True,
            timeout=_PATIENCE_S,
            check=True,
        )
        found: list[str] = json.loads(done.stdout)
    except (subprocess.SubprocessError, ValueError) as error:
        raise CheckpointError(
            f"{what} is not a regular expression that can be matched in {_PATIENCE_S:g} s; write a list of module names"
        ) from error
    return found


class MemoryLimit(TorchDispatchMode):
    """Inside, tensors that are made from numbers alone take no more memory than the adapter and its model warrant.

    Operations with tensors among their arguments are not counted: they start from something that is there.

    Args:
        model: the base model. Some methods number all weights of a layer (FourierFT), so its largest layer counts.
        file: the adapter's tensors.

    Raises:
        CheckpointError: more would be taken. It is raised before the memory is taken.
    """

    def __init__(self, model: nn.Module, file: Path) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        largest = max((math.prod(widths(module)) for module in model.modules() if is_linear(module)), default=0)
        self._limit = _SPARE_BYTES + largest * torch.int64.itemsize + _COPIES * file.stat().st_size
        self._file = file
        self._live: list[tuple[StorageWeakRef, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _on_meta(kwargs) or any(isinstance(leaf, Tensor) for leaf in tree_leaves((args, kwargs))):
            return func(*args, **kwargs)
        size = _bytes_of(func, args, kwargs)
        if self._used() + size > self._limit:
            raise CheckpointError(
                f"{self._file.parent / 'adapter_config.json'} states sizes that {self._file.name}, with "
                f"{self._file.stat().st_size:,} bytes, does not hold; fetch it again"
            )
        made = func(*args, **kwargs)
        if size and isinstance(made, Tensor):
            self._live.append((StorageWeakRef(made.untyped_storage()), size))
        return made

    def _used(self) -> int:
        self._live = [(storage, size) for storage, size in self._live if not storage.expired()]
        return sum(size for _, size in self._live)


def _on_meta(kwargs: dict[str, Any]) -> bool:
    return kwargs.get("device") is not None and torch.device(kwargs["device"]).type == "meta"


def _bytes_of(func: Any, args: Any, kwargs: dict[str, Any]) -> int:
    """The memory of an operation's results; it is tried on the meta device, which takes none."""
    without = {name: value for name, value in kwargs.items() if name not in ("generator", "pin_memory")}
    try:
        made = func(*args, **without | {"device": torch.device("meta")})
    except Exception:  # not an operation that makes a tensor on a device
        return 0
    return sum(math.prod(leaf.shape) * leaf.itemsize for leaf in tree_leaves(made))
