"""Loads models, tokenizers and adapters from folders that another party may have written. The commands use this module.

These functions run no code from a folder, unpickle nothing, and send no request to the hub for a local folder. A
missing tensor is an error, because transformers would initialise it at random. If you call `from_pretrained(...)`
yourself, pass `trust_remote_code=False`; the quantizer still refuses configuration that would override a
`RemoteConfig`.
"""

import logging
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from peft import PeftConfig, PeftModel, get_peft_model_state_dict, set_peft_model_state_dict
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
)

from symbiosis_priv.checkpoints.checkpoint import resolve
from symbiosis_priv.checkpoints.discovery.skeleton import architecture, load_config
from symbiosis_priv.checkpoints.forms import stated
from symbiosis_priv.checkpoints.vetting import on_this_machine, read_json, vet_adapter
from symbiosis_priv.errors import CheckpointError, SymbiosisError, UnsupportedModelError, one_line
from symbiosis_priv.system.files import read_limited
from tenant.model.adapter_limits import MemoryLimit, bounded_config, needs_weights
from tenant.model.hf import RemoteConfig, backend_of
from tenant.model.remote_linear import RemoteLayer
from tenant.model.widened import WidenedConfig
from tenant.preparation.own_tensors import tokenizer_files

log = logging.getLogger(__name__)

_LISTED = 3  # number of tensor names that an error message quotes
_MAX_TEMPLATE_BYTES = 1 << 20
_SHOWN = 200  # characters of another library's message that an error message quotes
_READ_FROM = "_read_from"  # attribute of a tokenizer: the states of the files that it was read from
_GENERATION_SETTINGS = (
    *("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id", "forced_bos_token_id"),
    *("forced_eos_token_id", "suppress_tokens", "begin_suppress_tokens", "bad_words_ids", "temperature", "top_k"),
    *("top_p", "min_p", "typical_p", "repetition_penalty", "no_repeat_ngram_size", "length_penalty"),
)
"""The settings that are read from generation_config.json: special tokens and sampling. Settings that change the number
of rows sent per token are ignored (rule 10): with prompt lookup, for instance, row counts would show executors where a
text repeats itself."""
_COMPARE_YOURSELF = (
    "Compare its outputs on inputs of your own, with and without RemoteConfig(masking='simulate') (docs/same-model.md)"
)


def load_model(
    model: str | Path,
    *,
    remote: RemoteConfig | None = None,
    dtype: torch.dtype | str = "auto",
    kind: Any = AutoModelForCausalLM,
) -> Any:
    """Load a model in evaluation mode.

    Args:
        remote: how to split the model; None loads the whole model.
        dtype: dtype of the tenant's tensors; "auto" uses the checkpoint's dtype.

    Raises:
        CheckpointError: transformers cannot load the checkpoint as `kind`, or tensors are missing.
        SymbiosisError: `resolve` or `open_backend` has failed.
    """
    folder = resolve(model)
    if remote is not None and remote.checkpoint is not None:
        resolve(remote.checkpoint)  # downloads a checkpoint on the hub
    given: dict[str, Any] = {} if remote is None else {"quantization_config": remote}
    if remote is None and stated(read_json(folder / "config.json")):  # weights in 8 or 4 bits
        given = {"quantization_config": WidenedConfig()}
    with on_this_machine():
        try:
            loaded, info = kind.from_pretrained(
                folder,
                trust_remote_code=False,
                local_files_only=True,
                use_safetensors=True,
                output_loading_info=True,
                dtype=dtype,
                **given,
            )
        except SymbiosisError:
            raise
        except Exception as error:  # transformers raises many types for malformed files
            raise CheckpointError(f"{model} cannot be loaded as {kind.__name__}: {error}") from error
    missing = sorted({*info["missing_keys"], *(key for key, *_ in info["mismatched_keys"])})
    if missing:
        raise CheckpointError(
            f"{model} is not a complete {type(loaded).__name__}: {_listed(missing)} would be random; "
            f"use a checkpoint that has them"
        )
    return loaded.eval()


def load_language_model(
    model: str | Path,
    *,
    remote: RemoteConfig | None = None,
    dtype: torch.dtype | str = "auto",
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> Any:
    """Load a model that predicts the next token, and set it to generate one token per forward pass. Arguments as for
    `load_model`.

    Args:
        tokenizer: the split model's tokenizer, from `load_tokenizer`. The preparation confirms the tokenizer's files
            while the model is loaded, so the files must be the same ones.

    Raises:
        CheckpointError: the files of `tokenizer` have changed since it was loaded.
        UnsupportedModelError: the model does not predict the next token. Its LM head would be random, or its input
            would include the token to predict.
        SymbiosisError: `load_model` has failed.
    """
    kind = architecture(load_config(resolve(model)))
    if not is_language_model(kind):
        raise UnsupportedModelError(
            f"{model} is a {kind.__name__}, which does not predict the next token from text alone. Load it with "
            f"{kind.__name__}.from_pretrained(path, quantization_config=RemoteConfig(...)), and use that with PEFT, or "
            f"with its processor and generate()"
        )
    loaded = load_model(model, remote=remote, dtype=dtype)
    if tokenizer is not None:
        _check_unchanged(loaded, model, tokenizer)
    if loaded.can_generate():
        stored = loaded.generation_config.to_dict()
        kept = {name: stored[name] for name in _GENERATION_SETTINGS if stored.get(name) is not None}
        loaded.generation_config = GenerationConfig(**kept)
    return loaded


def load_classifier(model: str | Path, *, remote: RemoteConfig, tokenizer: PreTrainedTokenizerBase) -> Any:
    """Load a model that classifies texts (`is_classifier`). Arguments and errors as for `load_language_model`."""
    loaded = load_model(model, remote=remote, kind=AutoModelForSequenceClassification)
    _check_unchanged(loaded, model, tokenizer)
    return loaded


def _check_unchanged(loaded: Any, model: str | Path, tokenizer: PreTrainedTokenizerBase) -> None:
    if _states(tokenizer_files(resolve(model))) != vars(tokenizer)[_READ_FROM]:
        backend_of(loaded).close()
        raise CheckpointError(f"the tokenizer of {model} changed while the model was being loaded; load both again")


def is_classifier(kind: type[PreTrainedModel]) -> bool:
    return kind.__name__ in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES.values()


def is_language_model(kind: type[PreTrainedModel]) -> bool:
    return kind.__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()


def check_reads_text(kind: type[PreTrainedModel]) -> None:
    """Raise `UnsupportedModelError` if the main input of an architecture is not token ids, but an image or sound."""
    if kind.main_input_name != "input_ids":
        raise UnsupportedModelError(
            f"a {kind.__name__} takes {kind.main_input_name}, and --text compares models on text. {_COMPARE_YOURSELF}"
        )


def check_runs_on_text(model: Any, ids: list[int]) -> None:
    """Run a model once on token ids alone. Raises `UnsupportedModelError` if the model fails."""
    try:
        with torch.no_grad():
            sides = ("", "decoder_") if model.config.is_encoder_decoder else ("",)
            model(**{f"{side}input_ids": torch.tensor([ids], dtype=torch.long, device=model.device) for side in sides})
    except Exception as error:  # any error of an architecture that lacks an input
        raise UnsupportedModelError(
            f"{type(model).__name__} does not run on text alone ({shortened(error)}). {_COMPARE_YOURSELF}"
        ) from error


def load_tokenizer(model: str | Path) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a checkpoint. Pass the tokenizer to `load_language_model`, which checks that its files have
    not changed until they were confirmed. Raises `CheckpointError`: there is no tokenizer, the tokenizer needs code of
    the checkpoint, or the folder changes."""
    folder = resolve(model)
    missing = CheckpointError(
        f"{model} has no tokenizer that transformers can load without running its code; add one: "
        f"tokenizer.save_pretrained({str(model)!r})"
    )
    files = tokenizer_files(folder)
    read = [*files, folder / "config.json", folder, folder / "additional_chat_templates"]
    before = _states(read)
    with on_this_machine():
        try:
            tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
                folder, trust_remote_code=False, local_files_only=True
            )
            vocabulary = tokenizer.get_vocab()
        except Exception as error:  # transformers raises many types for malformed files
            raise missing from error
    # without files, transformers makes some tokenizers of special tokens only, and SentencePiece's mark of a space
    if vocabulary.keys() <= {*tokenizer.all_special_tokens, "\N{LOWER ONE EIGHTH BLOCK}"}:
        raise missing
    if _states(read) != before:
        raise CheckpointError(f"{folder} changed while its tokenizer was being loaded; run the command again")
    vars(tokenizer)[_READ_FROM] = {path: before[path] for path in files}
    return tokenizer


def _states(paths: Iterable[Path]) -> dict[Path, tuple[int, ...]]:
    """Return inode, size and change time of each path that exists. A user cannot set a change time back."""
    found = {path: path.stat() for path in paths if path.exists()}
    return {path: (one.st_dev, one.st_ino, one.st_size, one.st_ctime_ns) for path, one in found.items()}


def warn_of_other_template(folder: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    """Log a warning if a PEFT folder has another chat template than the base model. A template decides how many rows a
    text becomes, so only the template that the user has prepared is used."""
    given: Any = tokenizer.chat_template
    known = given.get("default") if isinstance(given, dict) else given
    path, settings = folder / "chat_template.jinja", folder / "tokenizer_config.json"
    template: object = None  # as `tokenizer.save_pretrained` writes it
    try:
        if path.exists():
            template = read_limited(path, _MAX_TEMPLATE_BYTES).decode()
        elif settings.exists():
            template = read_json(settings).get("chat_template")
    except (OSError, UnicodeDecodeError, CheckpointError):  # unreadable, too large, or not UTF-8
        template = ""
    if isinstance(template, str) and template != known:
        log.warning(
            "the chat template in %s is not used: providers see how many rows a text becomes, and a template decides "
            "that. If you trust the template, copy it into the base model's folder (chat_template.jinja), and run "
            "`symbiosis-priv tenant prepare`",
            folder,
        )


def load_adapter(model: Any, folder: Path) -> Any:
    """Load the adapter of a PEFT folder into `model`, for inference. A refused adapter leaves the model as it was.
    Raises `ConfigError`: `folder` is not a PEFT folder; `CheckpointError`: the folder has settings that are not allowed
    (`vet_adapter`), or the adapter does not fit."""
    settings = vet_adapter(folder)
    trained_on = one_line(str(settings.get("base_model_name_or_path") or ""))[:_SHOWN]
    fix = "load the base model that it was trained on" + (f" ({trained_on})" if trained_on else "")
    with _undone_on_error(model), fitting(folder, fix=fix):
        config = PeftConfig.from_pretrained(str(folder), local_files_only=True)
        with (
            MemoryLimit(model, folder / "adapter_model.safetensors"),
            _unchanged(model, folder, biases=getattr(config, "bias", "none") not in ("none", False)),
        ):
            adapted = PeftModel.from_pretrained(
                model,
                str(folder),
                config=bounded_config(config, model, folder=folder),
                local_files_only=True,
                low_cpu_mem_usage=not needs_weights(settings),  # PEFT cannot make those on the meta device
            ).eval()
        held = (*adapted.named_parameters(), *adapted.named_buffers())
        check_adapter_is_whole(adapted, folder, fix=fix, without={name for name, tensor in held if tensor.is_meta})
    return adapted


@contextmanager
def fitting(folder: Path, *, fix: str) -> Iterator[None]:
    """Context manager: PEFT reads a folder, fetches nothing, and warns of nothing, because what it warns of is refused.
    Its errors are raised as `CheckpointError`, with `fix`: what to do."""
    with on_this_machine(), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        try:
            yield
        except SymbiosisError:
            raise
        except Exception as error:  # PEFT raises many types for malformed files, and may list hundreds of tensors
            reason = f"it lacks {error}" if isinstance(error, KeyError) else shortened(error)
            raise CheckpointError(f"the adapter in {folder} does not fit this model; {fix} ({reason})") from error


def check_adapter_is_whole(adapted: Any, folder: Path, *, fix: str, without: set[str]) -> None:
    """Raise `CheckpointError` if a PEFT folder has tensors for which the adapter has no place, or lacks tensors.
    `without`: the adapter's tensors that have no values after loading."""
    with safe_open(folder / "adapter_model.safetensors", framework="pt") as file:
        found = list(file.keys())
    modules = {name for name, _ in adapted.named_modules()}
    # the last two parts of a name are the PEFT method's module and the tensor
    if unmatched := [name for name in found if ".".join(name.split(".")[:-2]) not in modules]:
        raise CheckpointError(
            f"the adapter in {folder} does not fit this model, which has no place for {_listed(unmatched)}; {fix}"
        )
    # PEFT leaves these without values, on the meta device or as it initialises them
    missing = get_peft_model_state_dict(adapted, save_embedding_layers=False).keys() - set(found)
    if missing := missing or without:
        raise CheckpointError(
            f"the adapter in {folder} is not complete: adapter_config.json asks for {_listed(sorted(missing))}, "
            f"which adapter_model.safetensors lacks; fetch the adapter again, or {fix}"
        )


def load_adapter_tensors(adapted: Any, folder: Path) -> None:
    """Load the tensors of a PEFT folder into the adapter of a `PeftModel`. The base model does not change. Raises
    `CheckpointError`: the folder lacks tensors of the adapter, or has other tensors; `RuntimeError`: a tensor has
    another shape."""
    found = load_file(folder / "adapter_model.safetensors")
    # PEFT saves copies of the base model's embeddings beside an adapter on them
    own, saved = (get_peft_model_state_dict(adapted, save_embedding_layers=copies) for copies in (False, "auto"))
    if other := sorted((own.keys() - found.keys()) | (found.keys() - saved.keys())):
        raise CheckpointError(f"the tensors in {folder} are not those of the adapter: {_listed(other)}")
    set_peft_model_state_dict(adapted, {name: found[name] for name in own})


@contextmanager
def _undone_on_error(model: nn.Module) -> Iterator[None]:
    """Context manager: if the block fails, restore the attributes and children of the model's modules."""
    before = {module: (dict(vars(module)), dict(module._modules)) for module in model.modules()}
    try:
        yield
    except BaseException:
        for module, (attributes, children) in before.items():
            vars(module).clear()
            vars(module).update(attributes | {"_modules": children})
        raise


@contextmanager
def _unchanged(model: nn.Module, folder: Path, *, biases: bool) -> Iterator[None]:
    """Context manager: refuse tensors that PEFT would load into the base model, because they would outlive the adapter.
    The check runs before anything is loaded, on the names that PEFT derives from those in the file. Copies of the base
    model's own tensors are allowed (PEFT saves embeddings beside an adapter on them). `biases`: True if the adapter's
    configuration says that it trains the base model's biases. Raises `CheckpointError`: there is such a tensor."""
    # an offloaded layer loads no weight
    absent = {id(module.weight) for module in model.modules() if isinstance(module, RemoteLayer)}
    own = {id(tensor) for tensor in (*model.parameters(), *model.buffers())} - absent

    def check(module: nn.Module, state: dict[str, Tensor], prefix: str, *_: Any) -> None:
        held = (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False))
        for name, tensor in held:
            stored = state.get(prefix + name)
            if stored is None or id(tensor) not in own or (biases and name.endswith("bias")):
                continue
            if not torch.equal(stored.to(tensor), tensor):
                raise CheckpointError(f"the adapter in {folder} would replace the base model's {name}; use another one")

    hook = model.register_load_state_dict_pre_hook(check)
    try:
        yield
    finally:
        hook.remove()


def shortened(error: Exception) -> str:
    """Return another library's message as one line of limited length."""
    text = one_line(str(error))
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]} ..."


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return ", ".join(names[:_LISTED]) + more
