"""Checks task names and task folders. Another party may have written a folder and chosen its name."""

import math
import re
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open

from symbiosis_priv.checkpoints.vetting import vet_adapter
from symbiosis_priv.errors import CheckpointError, ConfigError

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
_READ = (".", CONFIG, TENSORS, "chat_template.jinja", "tokenizer_config.json")
"""The files of a task's folder that are read."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@dataclass(frozen=True, kw_only=True)
class TaskFolder:
    """A task's PEFT folder, its PEFT method in capitals, and the bytes of its file of tensors. `within` is the folder
    in which the files must lie; None if the user named `folder`."""

    folder: Path
    method: str
    bytes: int
    within: Path | None = None


def check_name(name: str) -> str:
    """Return `name`. Raises `ConfigError` unless it has 1 to 64 ASCII letters, digits, `.`, `_` and `-`, and begins
    with a letter or digit. So no name leads out of a folder, and no two names look alike."""
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"{name[:80]!a} is not a task name: write up to 64 of the characters A-Z a-z 0-9 . _ -, "
            f"beginning with a letter or digit"
        )
    return name


def stored(folder: Path, *, within: Path | None = None) -> TaskFolder:
    """Check a task's folder without reading its tensors. No symbolic link may lead out of `within`.

    Raises:
        ConfigError: the folder is not a PEFT folder.
        CheckpointError: `vet_adapter` refuses the folder, or a file lies outside `within`.
    """
    if within is not None:
        _check_links(folder, within)
    config = vet_adapter(folder)
    size = (folder / TENSORS).stat().st_size
    return TaskFolder(folder=folder, method=str(config.get("peft_type")).upper(), bytes=size, within=within)


def _check_links(folder: Path, within: Path) -> None:
    """Raise `CheckpointError` if a file of a task's folder that is read is a symbolic link out of `within`."""
    for path in (folder / name for name in _READ):
        if not path.resolve().is_relative_to(within.resolve()):
            raise CheckpointError(f"{path} is a symbolic link out of {within}; copy the task's files into its folder")


def memory_of(source: TaskFolder) -> int:
    """Return the bytes that a task's tensors take in memory. PEFT loads half precision as float32. The places of a
    sparse product are int32, and a pattern with as many numbers, and MaskBert's weights, are made of them. Raises
    `CheckpointError` if the file of tensors is damaged."""
    file = source.folder / TENSORS
    size = {"I32": 12, "I64": 16, "F64": 8}
    try:
        with safe_open(file, framework="pt") as tensors:
            slices = [tensors.get_slice(key) for key in tensors.keys()]  # noqa: SIM118 - it is not a dict
            return sum(math.prod(part.get_shape()) * size.get(part.get_dtype(), 4) for part in slices)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file} is damaged ({error}); fetch it again") from error


def stored_in(repository: Path) -> dict[str, TaskFolder]:
    """Check every task folder in `repository`. Returns them by name; files and hidden folders are skipped. Raises
    `ConfigError` or `CheckpointError` if one folder is refused (`check_name`, `stored`)."""
    if not repository.is_dir():
        raise ConfigError(f"the folder of tasks {repository} does not exist")
    folders = [path for path in sorted(repository.iterdir()) if path.is_dir() and not path.name.startswith(".")]
    return {check_name(path.name): stored(path, within=repository) for path in folders}
