"""Finds the calls of linears and experts, with their inputs, by running a model without its weights."""

import re
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedConfig, PreTrainedModel

from symbiosis_priv.checkpoints.discovery.experts import experts_of
from symbiosis_priv.checkpoints.discovery.inputs import Inputs, inputs_of
from symbiosis_priv.checkpoints.metadata import called, is_metadata
from symbiosis_priv.errors import UnsupportedModelError, one_line

_SHOWN = 200  # characters shown of an error of the model's own code
_LEAST_SHARE = 0.5  # if only parts of a model can be run, they must hold this share of its parameters
_Run = tuple[Callable[..., Any], Inputs]
_FEATURES = re.compile(r"get_(text|image|video|audio)_features")


@dataclass(frozen=True, eq=False)
class Call:
    """The first call of a module in one run of the model. Keeps the input alive, so that no other tensor gets the
    input's `id`."""

    name: str
    x: Tensor
    version: int
    run: int

    @property
    def input(self) -> tuple[int, int, int]:
        """The identity of the input tensor: equal for two calls of one run with the same tensor."""
        return self.run, id(self.x), self.version


def trace_calls(model: PreTrainedModel, modules: dict[str, nn.Module]) -> tuple[list[Call], set[str]]:
    """Run a model and, where this leaves modules out, its parts: once in inference and once in training.

    The forward pass of experts is replaced, because it depends on the values of routes.

    Args:
        modules: the linears and the modules of expert stacks to look for, by name.

    Returns:
        The first call of every module in inference, in order; and the names of modules whose parameters the model also
        uses outside such calls, which therefore cannot be offloaded.

    Raises:
        UnsupportedModelError: the model cannot be run without weights.
    """
    trace = _Trace(model, modules)
    handles = [m.register_forward_pre_hook(trace.enter(n), with_kwargs=True) for n, m in modules.items()]
    handles += [m.register_forward_hook(trace.leave, always_call=True) for m in modules.values()]
    for module in experts_of(model).values():
        module.forward = _unrouted
    try:
        runs = _run_all(model.eval(), trace)
        calls = trace.calls
        model.train()
        for function, inputs in runs:
            trace.run(function, inputs)  # a failure shows when the model is trained
    finally:
        for handle in handles:
            handle.remove()
        model.eval()
    return calls, trace.computed_with


def _unrouted(x: Tensor, *_: Any, **__: Any) -> Tensor:
    """Takes the place of the forward pass of experts, and returns a tensor of their result's shape."""
    return torch.empty_like(x)


class _Trace(TorchFunctionMode):
    """Records the calls of modules, and the use of their parameters outside such calls."""

    def __init__(self, model: nn.Module, modules: dict[str, nn.Module]) -> None:
        super().__init__()
        self._model = model
        self._modules = modules
        self.calls: list[Call] = []
        self.computed_with: set[str] = set()
        self._names = {id(p): name for name, m in modules.items() for p in m.parameters(recurse=False)}
        self._runs = 0
        self._inside = 0

    def within(self, prefix: str) -> set[str]:
        return {name for name in self._modules if name.startswith(prefix)}

    def share(self) -> float:
        """Share of the modules' parameters that runs have used."""
        reached = {call.name for call in self.calls}
        sizes = {name: sum(p.numel() for p in module.parameters()) for name, module in self._modules.items()}
        return sum(size for name, size in sizes.items() if name in reached) / sum(sizes.values())

    def unreached(self, prefix: str) -> set[str]:
        """The modules in `prefix` that no run has called."""
        return self.within(prefix) - {call.name for call in self.calls}

    def run(self, function: Callable[..., Any], inputs: dict[str, Any]) -> str:
        """Call a function of the model. Returns "", or where and why it failed; then its calls do not count."""
        before = self.calls
        self.calls = [*before]
        self._runs += 1
        self._inside = 0
        self._seen = {call.name for call in before}
        try:
            with self:
                function(**inputs)
        # the architecture's code may raise any error where it was not written for such inputs
        except Exception as error:
            self.calls = before
            return f"{self._place(error)}: {one_line(f'{type(error).__name__}: {error}')[:_SHOWN]}"
        return ""

    def _place(self, error: Exception) -> str:
        """The name of the innermost module whose code raised an error."""
        names = {id(module): name for name, module in self._model.named_modules()}
        owners = (frame.f_locals.get("self") for frame, _ in traceback.walk_tb(error.__traceback__))
        return next((names[id(o)] for o in reversed(list(owners)) if names.get(id(o))), type(self._model).__name__)

    def enter(self, name: str) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._inside += 1
            x = args[0] if args else next(iter(kwargs.values()))
            if name not in self._seen and x.numel():  # no rows: how many there are depends on unknown values
                self._seen.add(name)
                self.calls.append(Call(name, x, x._version, self._runs))

        return hook

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        self._inside -= 1

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if not self._inside:
            used = {self._names[id(x)] for x in _leaves((*args, *kwargs.values())) if id(x) in self._names}
            if used and not is_metadata(called(func)):
                self.computed_with |= used
        return func(*args, **kwargs)


def _leaves(values: Iterable[Any]) -> Iterator[Any]:
    """The arguments of a function, and those inside lists and other containers."""
    for value in values:
        if isinstance(value, Tensor | int | float | None):
            yield value
        else:
            yield from tree_leaves(value)


def _run_all(model: PreTrainedModel, trace: _Trace) -> list[_Run]:
    """Run the model on its main input, then on all its inputs, and then each part that no run has reached. Returns the
    runs without an error. Models of several modalities skip the towers that get no input, and require as many image
    tokens as there are features. So functions such as `get_image_features` run on their own."""
    runs: list[_Run] = []
    failures: list[str] = []

    def attempt(function: Callable[..., Any], config: PreTrainedConfig, main: str | None = None) -> bool:
        try:
            layouts = list(inputs_of(function, config, main))
        except (RuntimeError, TypeError, ValueError) as error:
            raise UnsupportedModelError(
                f"config.json states sizes of which no input can be made ({one_line(str(error))[:_SHOWN]}); "
                f"fetch it again"
            ) from error
        for inputs in layouts:
            failure = trace.run(function, inputs)
            if not failure:
                runs.append((function, inputs))
                return True
            failures.append(failure)
        return False

    whole = attempt(model.forward, model.config, model.main_input_name)
    owners: tuple[PreTrainedModel, ...] = (model, model.base_model)  # type: ignore[assignment]
    for part in dict.fromkeys(owners):
        for name in filter(_FEATURES.fullmatch, dir(type(part))):
            if trace.unreached(""):
                attempt(getattr(part, name), part.config)
    if trace.unreached(""):
        whole |= attempt(model.forward, model.config)
    for name, part in model.named_modules():
        if isinstance(part, PreTrainedModel) and name and trace.unreached(f"{name}.") == trace.within(f"{name}."):
            attempt(part.forward, part.config, part.main_input_name)
    if not trace.calls or (not whole and trace.share() < _LEAST_SHARE):
        raise UnsupportedModelError(
            f"{type(model).__name__} cannot be traced without weights; use a base model that runs on token ids, pixels "
            f"or sound alone. It said: {'; '.join(dict.fromkeys(failures))}"
        )
    return runs
