"""Configurations of a scheme and of its simulation, and comparisons of their results."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from symbiosis_priv.harness.local import LocalFederation
from tenant import RemoteConfig

DEADLINE_S = 120.0
Tensors = dict[str, Tensor]


def with_helpers(federation: LocalFederation, count: int) -> Path:
    """A federation file with one executor and fewer helpers."""
    path = federation.directory / f"{count}-helpers.toml"
    head, *providers = federation.federation.read_text().split("[[provider]]")
    path.write_text("[[provider]]".join([head, *providers[: 1 + count]]))
    return path


def config_for(federation: LocalFederation, scheme: str, **options: Any) -> RemoteConfig:
    """The configuration for the scheme "pad-1", "pad-2", "local", "none" or "simulate"."""
    masking: Any = scheme.partition("-")[0]
    if masking == "simulate":
        return RemoteConfig(masking=masking)
    path = with_helpers(federation, 1) if scheme == "pad-1" else federation.federation
    return RemoteConfig(federation=path, masking=masking, **{"deadline_s": DEADLINE_S, **options})


def adapter_of(model: Any) -> Tensors:
    """The trained tensors of a PEFT model."""
    return {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad}


def equal(a: Tensors, b: Tensors) -> bool:
    """Returns True if two sets of tensors have the same bits and are not empty."""
    return bool(a) and a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
