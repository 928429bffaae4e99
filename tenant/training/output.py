"""The folder that a fine-tuning run writes: the adapter itself, and beside it checkpoints to go on from.

    OUTPUT/adapter_config.json, adapter_model.safetensors     the PEFT folder: whole, and as new as the last checkpoint
    OUTPUT/checkpoint-N/                                      Trainer's, after N steps, with `run.json`

A checkpoint counts only if it is whole: `trainer_state.json` is the last that Trainer writes.
"""

from __future__ import annotations

import re
import tempfile
from pathlib import Path
from typing import Any

import msgspec

from symbiosis_priv.checkpoints.checkpoint import resolve
from symbiosis_priv.errors import ConfigError
from symbiosis_priv.system.files import UNDECODABLE, check_unused, default_cache, storing

_RECORD = "run.json"
_LAST_WRITTEN = "trainer_state.json"


class RunRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a run was started with and must go on with; by the names of `FineTuning`, where it has them.

    Args:
        model: digest of the quantised base model; None without a federation.
        data: SHA-256 of the token ids and labels.
    """

    model: str | None
    data: str
    rank: int
    alpha: int
    dropout: float
    target_modules: str
    learning_rate: float
    batch_size: int
    gradient_accumulation: int
    sequence_length: int
    seed: int
    pad_to_multiple_of: int = 1

    def check_continues(self, before: RunRecord) -> None:
        """Refuse to go on from another run's checkpoint.

        Raises:
            ConfigError: the message names every difference.
        """
        was, now = msgspec.structs.asdict(before), msgspec.structs.asdict(self)
        changed = [name for name in was if was[name] != now[name]]
        if changed:
            differences = ", ".join(
                "other data" if name == "data" else f"{name.replace('_', ' ')} {was[name]}, now {now[name]}"
                for name in changed
            )
            raise ConfigError(
                f"--resume goes on with what a run was started with, but this one had: {differences}. "
                f"Use the same again, or start anew in another --output"
            )


def check_output(
    output: Path, *, resume: bool, model: Path, checkpoint: str | Path | None = None, cache: str | Path | None = None
) -> None:
    """Refuse to write where anything else lives.

    Args:
        output: where the adapter is to go.
        resume: go on from what is there.
        model: the base model's folder.
        checkpoint: the full checkpoint, if `model` is not.
        cache: folder of quantised weights and verification keys; the user's cache folder if None.

    Raises:
        ConfigError: it lies in one of those folders or in another adapter, or is in use, or has nothing to resume.
    """
    apart = {"model's folder": model, "cache": default_cache() if cache is None else Path(cache)}
    if checkpoint is not None:
        apart["full checkpoint"] = resolve(checkpoint)
    real = output.resolve()
    for what, folder in apart.items():
        if real.is_relative_to(folder.resolve()) or folder.resolve().is_relative_to(real):
            raise ConfigError(f"--output {output} and the {what} ({folder}) lie in each other; choose another folder")
    if other := next((parent for parent in real.parents if (parent / "adapter_config.json").exists()), None):
        raise ConfigError(f"--output {output} lies in an adapter's folder ({other}); choose another folder")
    if resume:
        last_checkpoint(output)
        return
    try:
        check_unused(output)
    except ConfigError as error:
        hint = ", or pass --resume to go on" if list(output.glob("checkpoint-*")) else ""
        raise ConfigError(f"--output {output} is in use; choose another folder{hint}") from error


def last_checkpoint(output: Path) -> Path:
    """The newest whole checkpoint.

    Raises:
        ConfigError: there is none.
    """
    steps = {path: int(path.name.partition("-")[2]) for path in output.glob("checkpoint-*") if is_whole(path)}
    if not steps:
        raise ConfigError(f"there is no checkpoint to resume from in {output}; leave --resume out to start")
    return max(steps, key=lambda path: steps[path])


def is_whole(checkpoint: Path) -> bool:
    """Whether a run can go on from a checkpoint."""
    try:
        msgspec.json.decode((checkpoint / _LAST_WRITTEN).read_bytes())
        return bool(re.fullmatch(r"checkpoint-\d+", checkpoint.name)) and (checkpoint / _RECORD).is_file()
    except (OSError, *UNDECODABLE):
        return False


def write_record(checkpoint: Path, record: RunRecord) -> None:
    """Into a checkpoint that is about to be written."""
    checkpoint.mkdir(parents=True, exist_ok=True)
    (checkpoint / _RECORD).write_bytes(msgspec.json.encode(record))


def read_record(checkpoint: Path) -> RunRecord:
    """What the run behind a checkpoint was started with.

    Raises:
        ConfigError: it is damaged, or of another release.
    """
    try:
        return msgspec.json.decode((checkpoint / _RECORD).read_bytes(), type=RunRecord)
    except (OSError, *UNDECODABLE) as error:
        raise ConfigError(f"{checkpoint / _RECORD} cannot be read ({error}); start anew in another --output") from error


def save_adapter(model: Any, output: Path) -> None:
    """Write a PEFT model's folder; what was there before stays until all of it is written.

    Raises:
        StorageError: it cannot be written.
    """
    with storing(output):
        output.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=output, prefix=".saving-") as folder:
            model.save_pretrained(folder)
            for path in Path(folder).iterdir():
                path.replace(output / path.name)
