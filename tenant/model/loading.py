"""Models, tokenizers and adapters from folders that somebody else wrote: what the commands load with.

No code of theirs is run, nothing is unpickled, the hub is not asked about a folder that is here, and a tensor that is
not there is an error: transformers would make it up at random. (Your own `from_pretrained(...)` calls are yours: there,
the quantizer refuses what would override a `RemoteConfig`; `trust_remote_code=False` is for you to pass.)
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from peft import PeftConfig, PeftModel
from safetensors import safe_open
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from symbiosis_priv.checkpoints.checkpoint import resolve
from symbiosis_priv.checkpoints.layer_discovery import architecture, load_config
from symbiosis_priv.checkpoints.vetting import on_this_machine, vet_adapter
from symbiosis_priv.errors import CheckpointError, SymbiosisError, UnsupportedModelError, one_line
from tenant.model.adapter_limits import MemoryLimit, bounded_config
from tenant.model.hf import RemoteConfig

_LISTED = 3  # names of missing tensors that an error quotes
_SHOWN = 200  # characters of another library's message
_TASTE = (
    *("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id", "forced_bos_token_id"),
    *(
        "forced_eos_token_id",
        "suppress_tokens",
        "begin_suppress_tokens",
        "bad_words_ids",
        "temperature",
        "top_k",
        "top_p",
    ),
    *("min_p", "typical_p", "repetition_penalty", "no_repeat_ngram_size", "length_penalty"),
)
"""What generation_config.json may say: which tokens are special, and which are likely. How many rows are sent for them
is not its business (rule 10): with prompt lookup, executors would see from that where a text repeats itself."""
_NEXT_TOKEN = frozenset(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())


def load_model(
    model: str | Path,
    *,
    remote: RemoteConfig | None = None,
    dtype: torch.dtype | str = "auto",
    kind: Any = AutoModelForCausalLM,
) -> Any:
    """A model in evaluation mode: split if `remote` says how, whole otherwise.

    Args:
        model: a checkpoint folder, or a name on the hub.
        remote: how to split it.
        dtype: of the tensors here; "auto" for the checkpoint's.
        kind: a class with `from_pretrained`.

    Raises:
        CheckpointError: transformers cannot load it as `kind`, or tensors are missing.
        SymbiosisError: whatever `resolve` and opening a backend raise.
    """
    folder = resolve(model)
    if remote is not None and remote.checkpoint is not None:
        resolve(remote.checkpoint)  # fetches it, if it is on the hub
    split = {} if remote is None else {"quantization_config": remote}
    with on_this_machine():
        try:
            loaded, info = kind.from_pretrained(
                folder,
                trust_remote_code=False,
                local_files_only=True,
                use_safetensors=True,
                output_loading_info=True,
                dtype=dtype,
                **split,
            )
        except SymbiosisError:
            raise
        except Exception as error:  # whatever transformers makes of files that somebody else wrote
            raise CheckpointError(f"{model} cannot be loaded as {kind.__name__}: {error}") from error
    missing = sorted({*info["missing_keys"], *(key for key, *_ in info["mismatched_keys"])})
    if missing:
        raise CheckpointError(
            f"{model} is no whole {type(loaded).__name__}: {_some(missing)} would be random; "
            f"use a checkpoint that holds them"
        )
    return loaded.eval()


def load_language_model(
    model: str | Path, *, remote: RemoteConfig | None = None, dtype: torch.dtype | str = "auto"
) -> Any:
    """A model that predicts the next token, as `load_model` loads it, and generates one token after the other.

    Raises:
        UnsupportedModelError: it predicts something else; an LM head would be random, or see what it predicts.
        SymbiosisError: whatever `load_model` raises.
    """
    kind = architecture(load_config(resolve(model)))
    if not is_language_model(kind):
        raise UnsupportedModelError(
            f"{model} is a {kind.__name__}, which does not predict the next token. Load it with "
            f"{kind.__name__}.from_pretrained(path, quantization_config=RemoteConfig(...)) and train that with PEFT; "
            f"`symbiosis-priv tenant check` measures its embeddings"
        )
    loaded = load_model(model, remote=remote, dtype=dtype)
    if loaded.can_generate():
        said = loaded.generation_config.to_dict()
        taste = {name: said[name] for name in _TASTE if said.get(name) is not None}
        loaded.generation_config = GenerationConfig(**taste)
    return loaded


def is_language_model(kind: type[PreTrainedModel]) -> bool:
    """Whether an architecture predicts the next token."""
    return kind.__name__ in _NEXT_TOKEN


def load_tokenizer(model: str | Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a checkpoint.

    Raises:
        CheckpointError: it has none, or one that would run code of its own.
    """
    folder = resolve(model)
    missing = CheckpointError(
        f"{model} has no tokenizer that transformers can load without running its code; add one: "
        f"tokenizer.save_pretrained({str(model)!r})"
    )
    with on_this_machine():
        try:
            tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
                folder, trust_remote_code=False, local_files_only=True
            )
        except Exception as error:  # as above
            raise missing from error
    # without files, transformers makes some tokenizers up, and those know no text
    if set(tokenizer("text")["input_ids"]) <= set(tokenizer.all_special_ids):
        raise missing
    return tokenizer


def load_adapter(model: Any, folder: Path) -> Any:
    """`model` with the adapter of a PEFT folder, for inference.

    Raises:
        ConfigError: no PEFT folder.
        CheckpointError: the folder would decide what it may not, or belongs to another architecture.
    """
    said = vet_adapter(folder)
    misfit = f"the adapter in {folder} does not fit this model"
    with on_this_machine(), warnings.catch_warnings():
        # what an adapter does not hold PEFT starts from scratch, and only warns
        warnings.filterwarnings("error", message=".*Found missing adapter keys", category=UserWarning)
        try:
            config = PeftConfig.from_pretrained(str(folder), local_files_only=True)
            names = [name for name, _ in model.named_modules()]
            with MemoryLimit(model, folder / "adapter_model.safetensors"):
                adapted = PeftModel.from_pretrained(
                    model,
                    str(folder),
                    config=bounded_config(config, names, folder=folder),
                    local_files_only=True,
                    low_cpu_mem_usage=not said.get("layer_replication"),  # PEFT cannot do both
                ).eval()
        except SymbiosisError:
            raise
        except Exception as error:  # as above
            raise CheckpointError(f"{misfit}: {_summary(error)}; {_fix(said)}") from error
    homeless = _homeless(adapted, folder)
    if homeless:
        raise CheckpointError(f"{misfit}, which has no place for {_some(homeless)}; {_fix(said)}")
    return adapted


def _summary(error: Exception) -> str:
    """PEFT lists every missing tensor, and torch every tensor of another shape: hundreds of lines."""
    if isinstance(error, UserWarning):
        return "it lacks " + _some(re.findall(r"'([^']+)'", str(error)))
    text = one_line(str(error))
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]} ..."


def _fix(said: dict[str, Any]) -> str:
    trained_on = one_line(str(said.get("base_model_name_or_path") or ""))[:_SHOWN]
    return "load the base model that it was trained on" + (f" ({trained_on})" if trained_on else "")


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return ", ".join(names[:_LISTED]) + more


def _homeless(adapted: Any, folder: Path) -> list[str]:
    """Tensors of modules that the model does not have, which PEFT leaves out in silence."""
    modules = {name for name, _ in adapted.named_modules()}
    with safe_open(folder / "adapter_model.safetensors", framework="pt") as file:
        # a name ends in the method's own part and the tensor's
        return [name for name in file.keys() if ".".join(name.split(".")[:-2]) not in modules]  # noqa: SIM118
