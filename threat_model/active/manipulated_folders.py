"""An adversary that writes folders which the tenant loads: checkpoints, adapters and the tenant's cache (rule 10).

The adversary does not change what providers serve, so every answer would pass verification. The folders attack the
masking, and the tensors and facts that the tenant computes with.
"""

import json
import shutil
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from symbiosis_priv.checkpoints.vetting import QUANT_METHOD, vet_adapter
from symbiosis_priv.checkpoints.weights import WeightStore
from symbiosis_priv.errors import SymbiosisError
from tenant.model.hf import RemoteConfig, backend_of
from tenant.model.loading import load_adapter_tensors, load_language_model, load_tokenizer
from tenant.preparation.keys import prepare
from threat_model.lab import Lab

Change = Callable[[Path], object]
_TEMPLATE = "chat_template.jinja"


def attack_folders(lab: Lab) -> dict[str, bool]:
    """Attack the tenant with folders. Returns True for each attack that the tenant refused, by name. Raises
    `SymbiosisError`: the tenant refused an honest copy, so refused attacks would prove nothing."""
    cache = lab.cache
    prepare(lab.store, digest=lab.federation.model_digest, cache=cache)
    unmasked = {"quant_method": QUANT_METHOD, "masking": "none"}
    unmasked |= {"federation": str(lab.federation_path), "cache": str(cache)}
    changes: dict[str, Change] = {
        "a quantization_config that turns masking off": lambda folder: _edit(folder, quantization_config=unmasked),
        "the same, nested": lambda folder: _edit(folder, audio_config={"quantization_config": unmasked}),
        "a kernel to fetch and run": lambda folder: _edit(folder, attn_implementation="somebody/kernel"),
        "an adapter beside the model": lambda folder: (folder / "adapter_config.json").write_text("{}"),
        "another config.json": lambda folder: _edit(folder, rms_norm_eps=0.25),
        "embeddings times 3": lambda folder: _scale(folder, "embed_tokens.weight", 3.0),
        "a norm times 2": lambda folder: _scale(folder, "norm.weight", 2.0),
        "a chat template that repeats what a text says": _repeat_text,
        "an index that points to the tensors of another folder": _redirect,
    }
    keys = partial(
        prepare,
        None,
        digest=lab.federation.model_digest,
    )
    with tempfile.TemporaryDirectory() as temporary:
        scratch = Path(temporary)
        _load(lab, _copy(lab, scratch / "honest"), cache)
        refused = {}
        for name, change in changes.items():
            folder = _copy(lab, scratch / "hostile", change)
            refused[name] = _refused(partial(_load, lab, folder, cache))

        # one flipped bit of one weight scale, without a checkpoint to compare with
        copied = Path(shutil.copytree(cache, scratch / "cache"))
        for path in copied.glob("tenant/*/facts.safetensors"):
            tensors = load_file(path)
            name = next(name for name in tensors if name.endswith("channel_scale"))
            tensors[name].view(torch.uint8)[0] ^= 1
            path.write_bytes(save(tensors))
        store = WeightStore(lab.store.path)
        refused["a channel scale in the cache"] = _refused(partial(keys, model=store, cache=copied))

        # complete, sealed keys in a cache whose parent folder others can write to
        shared = scratch / "shared"
        prepare(lab.store, digest=lab.federation.model_digest, cache=shared / "cache")
        shared.chmod(0o777)
        refused["verification keys of another user"] = _refused(partial(keys, cache=shared / "cache"))

        # a tokenizer that was loaded with another template than the confirmed one
        late = _copy(lab, scratch / "late", _repeat_text)
        tokenizer = load_tokenizer(late)
        (late / _TEMPLATE).unlink()
        remote = RemoteConfig(federation=lab.federation_path, cache=cache)
        refused["a tokenizer that is replaced before it is confirmed"] = _refused(
            lambda: backend_of(load_language_model(late, remote=remote, tokenizer=tokenizer)).close()
        )

        # an adapter for which PEFT would load a second model
        shadow = scratch / "shadow"
        shadow.mkdir()
        save_file({}, shadow / "adapter_model.safetensors")
        said = {"peft_type": "SHADOW", "shadow_model": str(lab.store.path)}
        (shadow / "adapter_config.json").write_text(json.dumps(said))
        refused["an adapter that names another model to load"] = _refused(partial(vet_adapter, shadow))

        # a tenant that continues with the tensors of a training checkpoint which replaces a norm
        run, model = scratch / "run", _load(lab, lab.store.path, cache)
        name, norm = next((name, tensor) for name, tensor in model.named_parameters() if name.endswith("norm.weight"))
        adapted = get_peft_model(model, LoraConfig(target_modules="all-linear", r=1))
        adapted.save_pretrained(str(run))
        path = run / "adapter_model.safetensors"
        save_file(load_file(path) | {f"base_model.model.{name}": 2 * norm.detach()}, path, metadata={"format": "pt"})
        refused["a training checkpoint with a norm of the base model"] = _refused(
            partial(load_adapter_tensors, adapted, run)
        )
    return refused


def _copy(lab: Lab, folder: Path, change: Change = lambda folder: None) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(lab.store.path, folder)
    change(folder)
    return folder


def _refused(work: Callable[[], object]) -> bool:
    """Returns True if the tenant refuses some work. An accidental error of a library is not a refusal."""
    try:
        work()
    except Exception as error:
        return isinstance(error, SymbiosisError)
    return False


def _load(lab: Lab, folder: Path, cache: Path) -> Any:
    remote = RemoteConfig(federation=lab.federation_path, cache=cache)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, quantization_config=remote, trust_remote_code=False)
    backend_of(model).close()
    return model


def _repeat_text(folder: Path) -> None:
    """Adds a chat template that makes the number of rows depend on the first letter of a private message."""
    template = "{% for m in messages %}{{ m.content * (m.content | first | length) }}{% endfor %}"
    (folder / _TEMPLATE).write_text(template)


def _redirect(folder: Path) -> None:
    """Moves the honest checkpoint to `inner`, and leaves another config.json with an index of `inner`."""
    inner = Path(shutil.copytree(folder, folder / "inner"))
    (folder / "model.safetensors").unlink()
    weight_map = dict.fromkeys(load_file(inner / "model.safetensors"), "inner/model.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    _edit(folder, rms_norm_eps=0.25)


def _edit(folder: Path, **entries: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_bytes()) | entries))


def _scale(folder: Path, ending: str, factor: float) -> None:
    path = folder / "model.safetensors"
    tensors: dict[str, Tensor] = load_file(path)
    name = next(name for name in sorted(tensors) if name.endswith(ending))
    tensors[name] = tensors[name] * factor
    save_file(tensors, path, metadata={"format": "pt"})
