"""The model class of a checkpoint, from its configuration, and its modules without weights."""

from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from symbiosis_priv.checkpoints.discovery.known_values import forget_parameters
from symbiosis_priv.checkpoints.vetting import on_this_machine, vet
from symbiosis_priv.errors import UnsupportedModelError


def load_config(path: Path) -> PreTrainedConfig:
    """The configuration of the checkpoint in `path`, as transformers understands it. Raises `CheckpointError`: the
    folder overrides decisions of its user (`vetting.vet`); `UnsupportedModelError`: transformers does not know the
    model type, or the weights are quantised already."""
    vet(path)
    with on_this_machine():
        try:
            config: PreTrainedConfig = AutoConfig.from_pretrained(path, trust_remote_code=False, local_files_only=True)
        except Exception as error:  # transformers may raise anything on a foreign file
            raise UnsupportedModelError(f"{path} has a model type that transformers does not know: {error}") from error
    return config


def architecture(config: PreTrainedConfig) -> type[PreTrainedModel]:
    """The model class of a checkpoint, from its configuration. Raises `UnsupportedModelError`: transformers knows no
    class that the configuration names."""
    match config.architectures:
        case [str(name), *_]:
            kind = getattr(transformers, name, None)
            if isinstance(kind, type) and issubclass(kind, PreTrainedModel):
                return kind
    raise UnsupportedModelError(
        f"config.json names the architectures {config.architectures}, which transformers does not know"
    )


_INITIALISERS = frozenset(
    (
        *(nn.init.kaiming_uniform_, nn.init.uniform_, nn.init.normal_, nn.init.constant_),
        *(Tensor.uniform_, Tensor.normal_, Tensor.fill_, Tensor.zero_),
    )
)


class _OnMeta(TorchFunctionMode):
    """Computes no initial values of unknown tensors, and tells transformers that it builds on the meta device, so that
    it computes none either. transformers finds the device by making an empty tensor."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.tensor and args == ([],) and not kwargs:
            return torch.empty(0, dtype=torch.float32, device="meta")
        if func in _INITIALISERS and (tensor := args[0] if args else kwargs["tensor"]).is_meta:
            return tensor
        return func(*args, **kwargs)


def build(config: PreTrainedConfig) -> PreTrainedModel:
    """The model of a configuration, in evaluation mode, with parameters on the meta device. Raises
    `UnsupportedModelError`: the model cannot be built."""
    kind = architecture(config)
    try:
        with torch.device("meta"), _OnMeta():
            model: PreTrainedModel = kind._from_config(config, attn_implementation="eager")
            forget_parameters(model)
    except Exception as error:  # an architecture's code may raise any error on a foreign configuration
        raise UnsupportedModelError(f"{kind.__name__} cannot be built from its config.json: {error}") from error
    model.eval()
    return model
