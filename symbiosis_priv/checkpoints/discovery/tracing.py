"""Traces one forward pass of a model without weights."""

import contextlib
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel

from symbiosis_priv.checkpoints.discovery.experts import experts_of
from symbiosis_priv.checkpoints.metadata import called, is_metadata
from symbiosis_priv.errors import UnsupportedModelError

_TRACE_LENGTH = 4


def trace_calls(
    model: PreTrainedModel, modules: dict[str, nn.Module]
) -> tuple[list[tuple[str, Tensor, int]], set[str]]:
    """Trace one forward pass in inference and one in training. Experts are called and not run: they look at routes.

    Args:
        model: a model on the meta device.
        modules: the linears and the modules of expert stacks to look for, by name.

    Returns:
        The first call of every module in order, as (name, input, version of the input); and the names of modules whose
        parameters the model also uses outside such calls, which therefore cannot be offloaded.
    """
    trace = _Trace(modules)
    handles = [m.register_forward_pre_hook(trace.enter(n), with_kwargs=True) for n, m in modules.items()]
    handles += [m.register_forward_hook(trace.leave, always_call=True) for m in modules.values()]
    experts = experts_of(model).values()
    for module in experts:
        module.forward = _unrouted
    try:
        _run(model.eval(), trace)
        calls = trace.calls
        with contextlib.suppress(UnsupportedModelError):  # a failure shows when the model is trained
            _run(model.train(), trace)
    finally:
        for handle in handles:
            handle.remove()
        for module in experts:
            del module.forward
        model.eval()
    return calls, trace.computed_with


def _unrouted(x: Tensor, *_: Any, **__: Any) -> Tensor:
    """Stands for the forward pass of experts, whose result has the shape of their input."""
    return torch.zeros_like(x)


class _Trace(TorchFunctionMode):
    """Records the calls of modules in one forward pass."""

    def __init__(self, modules: dict[str, nn.Module]) -> None:
        super().__init__()
        self.computed_with: set[str] = set()
        self.start()
        self._names = {id(p): name for name, m in modules.items() for p in m.parameters(recurse=False)}

    def start(self) -> None:
        """Begin another pass. The inputs of two passes are never the same tensor."""
        self.calls: list[tuple[str, Tensor, int]] = []  # keeps the tensors, so that no id is reused
        self._seen: set[str] = set()
        self._inside = 0

    def enter(self, name: str) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._inside += 1
            if name not in self._seen:
                self._seen.add(name)
                x = args[0] if args else next(iter(kwargs.values()))
                self.calls.append((name, x, x._version))

        return hook

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        self._inside -= 1

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if not self._inside and not is_metadata(called(func)):
            self.computed_with.update(self._names[id(x)] for x in tree_leaves((args, kwargs)) if id(x) in self._names)
        return func(*args, **kwargs)


def _run(model: PreTrainedModel, trace: _Trace) -> None:
    """Run one forward pass on the meta device, where tensors have no values.

    Some models read values. Decoders read them without an explicit mask (transformers looks for packed sequences),
    encoders with one (they look whether it masks anything), and hybrids unless they get a cache and no mask. The call
    is made accordingly. Models that still read values get fake tensors, for which transformers has a tracing path.
    """
    failures = []
    for mode in (contextlib.nullcontext(), FakeTensorMode(allow_non_fake_inputs=True)):
        with trace, mode, torch.no_grad():
            ids = torch.zeros((1, _TRACE_LENGTH), dtype=torch.long, device="meta")
            sides = ("", "decoder_") if model.config.is_encoder_decoder else ("",)
            plain = {f"{side}input_ids": ids for side in sides}
            masked = plain | {f"{side}attention_mask": torch.ones_like(ids) for side in sides}
            for inputs in (masked | {"use_cache": False}, plain | {"use_cache": False}, plain | {"use_cache": True}):
                trace.start()
                try:
                    model(**inputs)
                    return
                except Exception as error:  # an architecture's own code, in a situation that it was not written for
                    failures.append(f"{type(error).__name__}: {error}")
    raise UnsupportedModelError(
        f"{type(model).__name__} cannot be traced without weights; use a base model that runs on token ids alone and "
        f"does not read the values of its activations: {'; '.join(dict.fromkeys(failures))}"
    )
