"""Refuses checkpoint and adapter folders that override the user's choices (rule 10 of the threat model).

transformers lets a folder override the caller's arguments: its `quantization_config` takes precedence (here it says how
weights are stored, and nothing else: `forms`), and the folder can refer to other files, name kernels to download and
run, or contain an adapter that is loaded without being asked for. The tenant does not trust the author of a folder with
these decisions. `vet` refuses such a folder with an error that names the entry; `on_this_machine` keeps transformers
from asking the hub about a local folder. Loading also passes
`trust_remote_code=False` everywhere.
"""

import json
import math
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from huggingface_hub import constants

from symbiosis_priv.checkpoints.forms import Form, stated
from symbiosis_priv.errors import CheckpointError, ConfigError, UnsupportedModelError, one_line
from symbiosis_priv.system.files import read_limited

QUANT_METHOD = "symbiosis-priv"  # the name under which transformers knows `tenant.RemoteConfig`

_MAX_JSON_BYTES = 16 << 20
_QUANTISED = ("quantization_config", "compression_config")
_SET_BY_A_MODEL = (*_QUANTISED, "megatron_config", "tokenizer_kwargs")
_OTHER_FILES = ("configuration_files", "transformers_weights")
_LAYERS = re.compile(r"(?:layers?|blocks|stages|depths?|attention_types|dense_replace)$")
_COUNTS = re.compile(r"(?:experts|labels)$")
_MAX_COUNT = 1 << 14  # limit of experts, labels and sizes, because Python builds a module for each
_MAX_LAYERS = 1 << 10  # limit of layers, each of many modules
# Without a group and with two repetitions at most, a match takes a polynomial of low degree in a name's length. Entries
# like `target_modules` may be any pattern: `tenant.model.adapter_limits` matches them with a time limit.
_SIMPLE_PATTERN, _MAX_REPEATS = re.compile(r"[\w.^$\\*+/-]{1,256}"), 2
_MAX_NAMES = 1 << 12  # of an adapter's lists; PEFT compares each name with all others and with each module
_MAX_PATTERNS = {"save": 1 << 6, "pattern": 1 << 10}  # of modules_to_save and rank_pattern: compiled for each module
_TOKENS, _MAX_TOKENS = ("token_indices", "trainable_token_indices"), 1 << 14
_METHOD = re.compile(r"[A-Za-z0-9_]{1,64}")
_KERNELS = ("attn_implementation", "_attn_implementation", "experts_implementation", "_experts_implementation")


def read_json(path: Path) -> dict[str, Any]:
    """Reads an untrusted JSON object. Raises `CheckpointError`: the file is unreadable, too large, too deeply nested,
    a pipe or a device, or not a JSON object."""
    try:
        # transformers uses this parser too, so both read the same values
        content = json.loads(read_limited(path, _MAX_JSON_BYTES).decode())
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror}); fetch it again") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged ({error}); fetch it again") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} is not a JSON object; download it again")
    return content


def vet(folder: Path) -> dict[str, Any]:
    """Refuse a checkpoint folder that overrides decisions of its user. Returns its config.json. Raises
    `CheckpointError`: config.json is damaged, or something in the folder overrides the user; `UnsupportedModelError`:
    the weights are stored in a form that is not read."""
    path = folder / "config.json"
    config = read_json(path)
    form_of(path, config)
    for key, value in _entries(config):
        _check_numbers(path, key, value)
        if key in _OTHER_FILES and value:
            raise CheckpointError(f"{path} points to other files ({key}); delete that entry, or use another checkpoint")
        if key in _KERNELS and any(
            "/" in str(name) for name in (value.values() if isinstance(value, dict) else [value])
        ):
            raise CheckpointError(
                f"{path} names a kernel to fetch and run ({key}); delete that entry, and choose one when you load"
            )
    if (folder / "adapter_config.json").exists():
        raise CheckpointError(
            f"{folder} holds an adapter next to the model, which transformers would load without being asked; "
            f"move adapter_* elsewhere and load it with PeftModel.from_pretrained(model, folder)"
        )
    if (folder / ".metadata").exists():
        raise CheckpointError(
            f"{folder} holds a distributed checkpoint (.metadata), which would have to be unpickled; convert it: "
            f"model.save_pretrained(path)"
        )
    return config


def form_of(path: Path, config: dict[str, Any]) -> Form | None:
    """The form in which the config.json in `path` says that weights are stored; None if it says nothing. Raises
    `CheckpointError`: the entry is damaged, or decides how rows are masked; `UnsupportedModelError`: the form is not
    read."""
    for key, value in _entries(config):
        if key in _QUANTISED and value:
            method = value.get("quant_method") if isinstance(value, dict) else value
            if method == QUANT_METHOD:
                raise CheckpointError(
                    f"{path} carries a {key} of {QUANT_METHOD}, and a checkpoint does not decide how it is masked and "
                    f"verified; if you trust the rest of it, delete that entry"
                )
            if value != stated(config):
                raise UnsupportedModelError(
                    f"{path} has a {key} ({one_line(str(method))[:40]}) where none is read; use the unquantised model "
                    f"that it was made from"
                )
    try:
        return Form.of(config)
    except (CheckpointError, UnsupportedModelError) as error:
        raise type(error)(f"{path}: {error}") from error


def vet_adapter(folder: Path) -> dict[str, Any]:
    """Refuse a PEFT folder that would run code, be unpickled, load other files, or take very long to build. (The
    tenant's `MemoryLimit` bounds the memory of the sizes that it states.) Returns its adapter_config.json. Raises
    `ConfigError`: not a PEFT folder; `CheckpointError`: the folder is refused, or adapter_config.json is damaged."""
    path = folder / "adapter_config.json"
    if not path.is_file():
        raise ConfigError(
            f"{folder} is not a PEFT folder: it has no adapter_config.json"
            if folder.is_dir()
            else f"the adapter's folder {folder} does not exist"
        )
    config = read_json(path)
    for key, value in _entries(config):
        if key in _SET_BY_A_MODEL and value:
            raise CheckpointError(f"{path} has an entry {key}, which an adapter must not set; delete it")
        if key.endswith(("_path", "_file")) and not key.endswith("name_or_path") and value:
            raise CheckpointError(f"{path} names a file to load beside it ({key}); delete that entry")
        if key == "shadow_model" and value != "mirror":
            raise CheckpointError(f"{path} names another model to load ({key}); use an adapter with 'mirror'")
        if isinstance(value, list | dict):
            most = _MAX_TOKENS if key in _TOKENS else _MAX_PATTERNS.get(key.rpartition("_")[2], _MAX_NAMES)
            if len(value) > most:
                raise CheckpointError(f"{path} has {len(value)} entries in {key}, and at most {most} are allowed")
    for key, value in config.items():
        if key == "modules_to_save" or key.endswith("_pattern"):  # PEFT matches these as regular expressions
            patterns = [value] if isinstance(value, str) else list(value) if isinstance(value, list | dict) else []
            for pattern in map(str, patterns):
                if not _SIMPLE_PATTERN.fullmatch(pattern) or pattern.count("*") + pattern.count("+") > _MAX_REPEATS:
                    raise CheckpointError(
                        f"{path} has the pattern {pattern[:40]!r} in {key}; write module names in full"
                    )
    method = config.get("peft_type")
    if not isinstance(method, str) or not _METHOD.fullmatch(method):
        raise CheckpointError(f"{path} states no PEFT method (peft_type = {str(method)[:40]!r}); fetch it again")
    if method.upper() == "XLORA":
        raise CheckpointError(f"{folder} is an X-LoRA, which loads further adapters from any folder; use LoRA")
    if not (folder / "adapter_model.safetensors").is_file():
        raise CheckpointError(
            f"{folder} has no adapter_model.safetensors (a .bin would have to be unpickled); save it again with PEFT"
        )
    parts = [config.get(name) or 1 for name in ("n_skills", "n_splits")]  # Poly initialises each pair in Python
    if not all(isinstance(part, int) for part in parts) or math.prod(parts) > _MAX_LAYERS:
        raise CheckpointError(
            f"{path} states n_skills and n_splits = {str(parts)[:40]}; use at most {_MAX_LAYERS} pairs"
        )
    for key, value in _entries(config):
        _check_numbers(path, key, value)
    return config


def _check_numbers(path: Path, key: str, value: Any) -> None:
    """Refuse a number of layers, experts or labels that is so large that building the model would not end."""
    waiting, large = [value], [0.0]  # the numbers in the entry's lists, at any depth
    while waiting:
        item = waiting.pop()
        if isinstance(item, list):
            waiting.extend(item)
        elif isinstance(item, int | float) and item > _MAX_LAYERS:  # most entries have none, and need no search
            large.append(item)
    if large[1:] and max(large) > (
        _MAX_LAYERS if _LAYERS.search(key) else _MAX_COUNT if _COUNTS.search(key) else math.inf
    ):
        raise CheckpointError(f"{path} says {key} = {str(value)[:40]}, more than any model has; download it again")


def _entries(value: Any) -> Iterator[tuple[str, Any]]:
    """Every key with its value, at any depth."""
    waiting = [value]
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            yield from value.items()
            waiting.extend(value.values())
        elif isinstance(value, list):
            waiting.extend(value)


_switch = threading.RLock()


@contextmanager
def on_this_machine() -> Iterator[None]:
    """Disables requests to the hub inside this context, like HF_HUB_OFFLINE=1, for the whole process. The hub's client
    and transformers check this switch before every request."""
    with _switch:
        before, constants.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE, True
        try:
            yield
        finally:
            constants.HF_HUB_OFFLINE = before
