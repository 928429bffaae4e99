"""Which linears of a model are offloaded, and which of them share an input.

Both sides run this on the checkpoint's config alone: the architecture is built on the meta device (no memory) and
traced once. Linears of one block that receive the *same tensor* are siblings and form one group, whatever they are
called: q/k/v, gate/up, a fused c_attn. No list of architectures is kept; the manifest's digest proves that both sides
found the same.
Embeddings and a tied LM head stay with the tenant.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from symbiosis_priv.errors import UnsupportedModelError

_TRACE_LENGTH = 4


@dataclass(frozen=True)
class GroupSpec:
    """A group of linears that share one input. `members` are module names in call order, `outputs` their widths."""

    members: tuple[str, ...]
    inputs: int
    outputs: tuple[int, ...]

    @property
    def name(self) -> str:
        """A readable, unique name: the first member's, plus how many siblings ride along."""
        return self.members[0] if len(self.members) == 1 else f"{self.members[0]}+{len(self.members) - 1}"


@dataclass(frozen=True)
class Skeleton:
    """A model's structure without its weights."""

    groups: tuple[GroupSpec, ...]
    base_prefix: str
    transposed: frozenset[str]
    """Members stored as `[in, out]` (`Conv1D`)."""


def is_linear(module: nn.Module) -> bool:
    """Whether a module is a linear that can be offloaded."""
    return isinstance(module, (nn.Linear, Conv1D))


def widths(module: nn.Module) -> tuple[int, int]:
    """(inputs, outputs) of an `nn.Linear` or `Conv1D`."""
    if isinstance(module, nn.Linear):
        return module.in_features, module.out_features
    assert isinstance(module, Conv1D)
    return int(module.nx), int(module.nf)


def discover(path: Path) -> Skeleton:
    """Find the layer groups of the checkpoint in `path`, from its config.json.

    Raises:
        UnsupportedModelError: the architecture is unknown to transformers or cannot be traced.
    """
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=False)
    except (ValueError, OSError) as error:
        raise UnsupportedModelError(f"{path} is of no model type that transformers knows: {error}") from error
    model = _skeleton(config)
    kept = _tied_modules(model)
    linears = {n: m for n, m in model.named_modules() if is_linear(m) and n not in kept}
    calls = _trace(model, linears)
    groups: dict[tuple[int, str], list[str]] = {}
    for name, x in calls:
        groups.setdefault((id(x), _block(name)), []).append(name)
    specs = []
    for members in groups.values():
        inputs, _ = widths(linears[members[0]])
        specs.append(GroupSpec(tuple(members), inputs, tuple(widths(linears[m])[1] for m in members)))
    if not specs:
        raise UnsupportedModelError(f"{type(model).__name__} has no frozen linear that could be offloaded")
    return Skeleton(
        groups=tuple(specs),
        base_prefix=model.base_model_prefix,
        transposed=frozenset(n for n, m in linears.items() if isinstance(m, Conv1D)),
    )


def _skeleton(config: PreTrainedConfig) -> PreTrainedModel:
    import transformers

    architectures = config.architectures or []
    kind = getattr(transformers, architectures[0], None) if architectures else None
    if not (isinstance(kind, type) and issubclass(kind, PreTrainedModel)):
        raise UnsupportedModelError(f"config.json names the architectures {architectures}, none known to transformers")
    with torch.device("meta"):
        model: PreTrainedModel = kind._from_config(config, attn_implementation="eager")
    model.eval()
    return model


def _tied_modules(model: PreTrainedModel) -> set[str]:
    """Linears whose weight is another module's parameter too (a tied LM head): the tenant has them anyway."""
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    tied = set(model.all_tied_weights_keys) if model.config.tie_word_embeddings else set()
    return {
        name
        for name, module in model.named_modules()
        if is_linear(module) and (id(module.weight) in embeddings or f"{name}.weight" in tied)
    }


def _trace(model: PreTrainedModel, linears: dict[str, nn.Module]) -> list[tuple[str, Tensor]]:
    calls: list[tuple[str, Tensor]] = []  # holds the tensors, so that no id is reused
    seen: set[str] = set()

    def record(name: str) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if name not in seen:
                seen.add(name)
                calls.append((name, args[0] if args else kwargs["input"]))

        return hook

    handles = [m.register_forward_pre_hook(record(n), with_kwargs=True) for n, m in linears.items()]
    try:
        _run(model)
    finally:
        for handle in handles:
            handle.remove()
    return calls


def _run(model: PreTrainedModel) -> None:
    """One forward pass on the meta device.

    Decoders want an explicit mask (without one, transformers looks for packed sequences, which needs real values);
    encoders want none (with one, they look whether it masks anything).
    """
    ids = torch.zeros((1, _TRACE_LENGTH), dtype=torch.long, device="meta")
    sides = ("", "decoder_") if model.config.is_encoder_decoder else ("",)
    plain = {f"{side}input_ids": ids for side in sides}
    masked = plain | {f"{side}attention_mask": torch.ones_like(ids) for side in sides}
    failures = []
    for inputs in (masked, plain):
        try:
            with torch.no_grad():
                model(**inputs, use_cache=False)
            return
        except (RuntimeError, NotImplementedError, TypeError, ValueError) as error:
            failures.append(str(error))
    raise UnsupportedModelError(f"{type(model).__name__} cannot be traced without weights: {'; '.join(failures)}")


def _block(name: str) -> str:
    """The repeated block a module lives in: `model.layers.3.mlp.up_proj` -> `model.layers.3`."""
    parts = name.split(".")
    for i, part in enumerate(parts):
        if part.isdigit():
            return ".".join(parts[: i + 1])
    return name.rpartition(".")[0]
