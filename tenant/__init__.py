"""The tenant's side: a Hugging Face model whose frozen linears run at providers it does not trust.

    model = AutoModelForCausalLM.from_pretrained(path, quantization_config=RemoteConfig(federation="federation.toml"))

Read in this order: `model` (connects Hugging Face models), `core` (pads, masked rows, verification),
`session` (masked, verified products and failover), `routing` (chooses providers), `connections` (TLS), `tasks`
(adapters of many methods). The docstring of each folder names its modules.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

import symbiosis_priv  # noqa: F401  (limits oneDNN before torch's first product)

if TYPE_CHECKING:  # all import torch, so `__getattr__` imports them
    from tenant.endpoint.rollouts import batched_rollouts
    from tenant.model.all_logits import compute_all_logits
    from tenant.model.hf import RemoteConfig, backend_of
    from tenant.model.rounded import rounded_model
    from tenant.tasks import Tasks
    from tenant.tasks.methods import BitFitConfig, BottleneckConfig, DiffPruningConfig, MaskBertConfig

_METHODS = "tenant.tasks.methods"
_MODULES = {
    "BitFitConfig": _METHODS,
    "BottleneckConfig": _METHODS,
    "DiffPruningConfig": _METHODS,
    "MaskBertConfig": _METHODS,
    "RemoteConfig": "tenant.model.hf",
    "Tasks": "tenant.tasks",
    "backend_of": "tenant.model.hf",
    "batched_rollouts": "tenant.endpoint.rollouts",
    "compute_all_logits": "tenant.model.all_logits",
    "rounded_model": "tenant.model.rounded",
}
__all__ = [
    "BitFitConfig",
    "BottleneckConfig",
    "DiffPruningConfig",
    "MaskBertConfig",
    "RemoteConfig",
    "Tasks",
    "backend_of",
    "batched_rollouts",
    "compute_all_logits",
    "rounded_model",
]


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used, so that a command's `--help` does not wait for torch."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import_module(_METHODS)  # makes its methods known to PEFT
    return getattr(import_module(_MODULES[name]), name)
