"""The output folder of a fine-tuning run: the adapter, and checkpoints from which a run can continue.

    OUTPUT/adapter_config.json, adapter_model.safetensors     the PEFT folder, at least as new as the last checkpoint
    OUTPUT/checkpoint-N/                                      Trainer's checkpoint after N steps, and `run.json`

A checkpoint is complete if it has a readable `trainer_state.json`, which Trainer writes last.
"""

import contextlib
import json
import os
import re
import tempfile
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec

from symbiosis_priv.checkpoints.checkpoint import hub_name, resolve
from symbiosis_priv.checkpoints.vetting import read_json
from symbiosis_priv.errors import ConfigError
from symbiosis_priv.system.files import UNDECODABLE, check_unused, default_cache, lock, read_limited, storing
from tenant.training.options import FineTuning

_RECORD = "run.json"
_LAST_WRITTEN = "trainer_state.json"
_SHARED = (
    *("rank", "alpha", "dropout", "target_modules", "learning_rate", "beta", "batch_size", "gradient_accumulation"),
    *("sequence_length", "pad_to_multiple_of", "packing", "seed", "dtype"),
)
_MOST_BYTES = 256 << 20  # largest size of a JSON file; trainer_state.json has a line for each step


Record = dict[str, Any]
"""The settings that a resumed run must share with the run that it continues, by name."""


def make_record(options: FineTuning, *, model: str | None, data: str, began: datetime) -> Record:
    """Return the record of a run. `model`: digest of the quantised base model; None without a federation. `data`:
    SHA-256 of the token ids and labels. `began`: what chat templates render as the present time."""
    chosen = {name: getattr(options, name) for name in _SHARED}
    return {
        **chosen,
        "model": model,
        "data": data,
        "began": began.isoformat(),
        "alpha": 2 * options.rank if options.alpha is None else options.alpha,
    }


def check_continues(record: Record, checkpoint: Path) -> None:
    """Refuse a checkpoint of a run with other settings. Raises `ConfigError`, which names every difference."""
    written = _read_record(checkpoint)
    defaults = {name: getattr(FineTuning(), name) for name in _SHARED}  # an earlier release has fewer names, or others
    was = {"model": None, "data": None, "began": record["began"], **defaults, **written}
    if changed := [name for name in record if was[name] != record[name]]:
        differences = ", ".join(
            "other data" if name == "data" else f"{name.replace('_', ' ')} {was[name]}, now {record[name]}"
            for name in changed
        )
        raise ConfigError(
            f"--resume needs the settings of the run in {checkpoint}, and these differ: {differences}. "
            f"Use the same settings, or start a new run in another --output"
        )


def began_at(checkpoint: Path | None) -> datetime:
    """Return when the run of a checkpoint began; now for a new run."""
    written = _read_record(checkpoint).get("began") if checkpoint else None
    with contextlib.suppress(TypeError, ValueError):  # an earlier release wrote none
        return datetime.fromisoformat(written or "")
    return datetime.now()


def _read_record(checkpoint: Path) -> Record:
    path = checkpoint / _RECORD
    try:
        return msgspec.json.decode(read_limited(path, _MOST_BYTES), type=dict[str, Any])
    except (OSError, *UNDECODABLE) as error:
        raise ConfigError(f"{path} cannot be read ({error}); start a new run in another --output") from error


def check_output(
    output: Path, *, resume: bool, model: Path, checkpoint: str | Path | None = None, cache: str | Path | None = None
) -> None:
    """Refuse an output folder in which a run would overwrite other files. `checkpoint`: the full checkpoint, if `model`
    is a slim one. `cache`: folder of quantised weights and verification keys; the user's cache folder if None. Raises
    `ConfigError`: `output` contains or lies in one of these folders, lies in another adapter's folder, is in use, or
    has no checkpoint to resume from."""
    apart = {"model's folder": model, "cache": default_cache() if cache is None else Path(cache)}
    if checkpoint is not None:
        apart["full checkpoint"] = resolve(checkpoint)
    real = output.resolve()
    for what, folder in apart.items():
        if real.is_relative_to(folder.resolve()) or folder.resolve().is_relative_to(real):
            raise ConfigError(f"--output {output} overlaps the {what} ({folder}); choose another folder")
    if other := next((parent for parent in real.parents if (parent / "adapter_config.json").exists()), None):
        raise ConfigError(f"--output {output} lies in an adapter's folder ({other}); choose another folder")
    if resume:
        last_checkpoint(output)
        return
    try:
        check_unused(output)
    except ConfigError as error:
        hint = ", or pass --resume to continue" if list(output.glob("checkpoint-*")) else ""
        raise ConfigError(f"--output {output} is in use; choose another folder{hint}") from error


@contextlib.contextmanager
def claimed(output: Path, *, option: str = "--output") -> Iterator[None]:
    """Context manager: make the folder of an option, and lock it against other runs. A new folder that stays empty is
    removed. Raises `ConfigError` if another run uses the folder, `StorageError` if the folder cannot be made."""
    new = not output.exists()
    with storing(output):
        output.mkdir(mode=0o700, parents=True, exist_ok=True)  # adapters tell what they learned
        with tempfile.TemporaryDirectory(dir=output):  # fails now if nothing can be written there
            pass
        descriptor = os.open(output, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with contextlib.suppress(OSError):  # a network file system may not support locks of folders
            if not lock(descriptor):
                new = False
                raise ConfigError(f"another run uses {option} {output}; wait for it, or choose another folder")
        yield
    finally:
        os.close(descriptor)
        if new:
            with contextlib.suppress(OSError):  # the folder has files
                output.rmdir()


def check_space(output: Path, size: int) -> None:
    """Raise `StorageError` unless the file system of a folder has room for `size` bytes."""
    with storing(output), tempfile.TemporaryFile(dir=output) as file:
        if hasattr(os, "posix_fallocate") and size:  # counts quotas too, which the number of free bytes does not
            os.posix_fallocate(file.fileno(), 0, size)


def last_checkpoint(output: Path, *, of: Record | None = None) -> Path:
    """Return the newest complete checkpoint. Raises `ConfigError` if `output` has none, or has a checkpoint of another
    run than `of`, which the run would delete."""
    found = [path for path in output.glob("checkpoint-*") if path.is_dir() and any(path.iterdir())]
    if not (whole := [path for path in found if is_whole(path)]):
        raise ConfigError(f"there is no checkpoint to resume from in {output}; leave --resume out to start")
    if of is not None:
        for path in found:
            check_continues(of, path)
    return max(whole, key=step_of)


def step_of(checkpoint: Path) -> int:
    """Return the number of steps after which a checkpoint was written."""
    return int(checkpoint.name.partition("-")[2])


def is_whole(checkpoint: Path) -> bool:
    """Returns True if a checkpoint is complete, so that a run can continue from it."""
    try:
        msgspec.json.decode(read_limited(checkpoint / _LAST_WRITTEN, _MOST_BYTES))
        return bool(re.fullmatch(r"checkpoint-\d+", checkpoint.name)) and (checkpoint / _RECORD).is_file()
    except (OSError, *UNDECODABLE):
        return False


def write_record(checkpoint: Path, record: Record) -> None:
    """Write a run's settings into the folder of a new checkpoint."""
    checkpoint.mkdir(parents=True, exist_ok=True)
    (checkpoint / _RECORD).write_bytes(msgspec.json.encode(record))


def save_adapter(model: Any, output: Path) -> None:
    """Write a PEFT model's folder. Earlier files are replaced after all new files were written. Raises `StorageError`
    if the folder cannot be written."""
    with storing(output):
        output.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=output, prefix=".saving-") as folder:
            model.save_pretrained(folder)
            settings = Path(folder) / "adapter_config.json"
            config = read_json(settings)
            if (pinned := hub_name(Path(str(config.get("base_model_name_or_path"))))) is not None:
                # in place of the cache's folder, and only here: PEFT would ask the hub about a name while it saves
                config["base_model_name_or_path"], config["revision"] = pinned
                settings.write_text(json.dumps(config, indent=2, sort_keys=True), encoding="utf-8")
            for path in Path(folder).iterdir():
                path.replace(output / path.name)
