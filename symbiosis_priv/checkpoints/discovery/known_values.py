"""Runs a model without its weights, and keeps the values that do not depend on weights, pixels or samples.

A tensor that depends on weights, pixels or samples is *unknown*: it is on the meta device, has a shape and takes no
memory. All other tensors (token ids, masks, positions, image grids, buffers) are *known*: the code of many models
decides by their values what to run next. Where code asks for an unknown value, it gets zero. So a linear that runs on
a number of rows which depends on weights or inputs, such as one expert, runs on none here.

Memory and time are bounded whatever a configuration asks for: a tensor of more than `_MOST_VALUES` elements is
unknown, and the number of operations is limited.
"""

import contextlib
import functools
import random
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from symbiosis_priv.errors import UnsupportedModelError

_aten = torch.ops.aten

_MOST_VALUES = 1 << 16
_BUDGET = 1 << 17  # operations, of some 0.1 ms each; a Llama of 126 layers takes 27,000, a Mamba 2 of 64 takes 50,000
_VALUES_PER_OPERATION = 1 << 12  # an operation on many values takes the time of several

_MOST_RESULTS = 1 << 13  # operations in `_results`, of some 1 KB each

_UNINITIALISED = frozenset((_aten.empty, _aten.empty_like, _aten.empty_strided, _aten.new_empty))
_BY_SHAPE = frozenset(
    (
        *(_aten.zeros_like, _aten.ones_like, _aten.full_like, _aten.rand_like, _aten.randn_like),
        *(_aten.new_zeros, _aten.new_ones, _aten.new_full),
    )
)
"""Operations whose result depends only on the shape of their operand, so its values are known."""
_INDEXED = frozenset((_aten.index, _aten.index_put, _aten.index_put_, _aten._unsafe_index))
_EQUALITY = frozenset((_aten.eq.Scalar, _aten.ne.Scalar))
"""An unknown real number is taken to be equal to no number. (Some models compare pixels with 0 to find blank
images.)"""
_SHAPED_BY_VALUES = (torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output)


class KnownValues(TorchDispatchMode):
    """Context manager in which a model is built and run without weights. Raises `UnsupportedModelError`: the model
    takes too many operations, or looks at a large tensor's values."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._left = _BUDGET
        self._literals = _Literals()

    def __enter__(self) -> Self:
        self._literals.__enter__()  # type: ignore[no-untyped-call]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._literals.__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        kind = func.overloadpacket
        operands = _tensors((*args, *kwargs.values()))
        known = [operand for operand in operands if not operand.is_meta]
        unknown = len(known) < len(operands)
        self._spend(sum(operand.numel() for operand in known))
        if kind in _INDEXED:
            positions: list[Tensor | None] = []  # a mask is replaced by the positions where it is true
            for index in args[1]:
                is_mask = index is not None and index.dtype in (torch.bool, torch.uint8)
                if is_mask:
                    self._spend(index.numel())
                positions += _zeros(index).nonzero(as_tuple=True) if is_mask else [index]
            args = (args[0], positions, *args[2:])
        elif any(tag in func.tags for tag in _SHAPED_BY_VALUES):
            args = _each(_zeros, args)
            operands = _tensors(args)
            most = sum(operand.numel() for operand in operands)  # of the elements that the operation makes
            if kind is _aten.repeat_interleave:
                most = int(operands[0].sum())
            elif kind is _aten.bincount:
                most = int(operands[0].max()) + sum(arg for arg in args if isinstance(arg, int))
            self._spend(most)
            return func(*args, **kwargs)
        elif unknown and kind is _aten._to_copy and _asks_for(kwargs, "cpu") and args[0].numel() <= _MOST_VALUES:
            return _zeros(args[0]).to(kwargs.get("dtype") or args[0].dtype)  # Python code is about to read the values
        elif unknown and kind in _BY_SHAPE:
            args, unknown = (torch.empty((), dtype=args[0].dtype, device="cpu").expand(args[0].shape), *args[1:]), False
        elif func in _EQUALITY and unknown and args[0].is_floating_point():
            return torch.tensor(kind is _aten.ne, dtype=torch.bool, device="cpu").expand(args[0].shape)
        result = _without_values(func, args, kwargs)
        if unknown:
            writes = func._schema.name.endswith("_") and isinstance(args[0], Tensor)
            return args[0] if writes and not args[0].is_meta else result  # known values stay as they are
        elements = sum(tensor.numel() for tensor in _tensors((result,)))
        if elements > _MOST_VALUES or (kind in _UNINITIALISED and _asks_for(kwargs, "meta")):
            return result
        self._spend(elements)
        result = _on("cpu", func, args, kwargs)
        return result.zero_() if kind in _UNINITIALISED else result

    def _spend(self, values: int) -> None:
        self._left -= 1 + values // _VALUES_PER_OPERATION
        if self._left < 0:
            raise UnsupportedModelError("the model of this config.json takes too many operations to be traced")


_LITERALS = frozenset((torch.tensor, torch.as_tensor, Tensor.new_tensor))


class _Literals(TorchFunctionMode):
    """Keeps the values of `torch.tensor([...])` on the meta device, which no operation of the dispatcher shows."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if func in _LITERALS:
            kwargs = kwargs | {"device": "cpu"}
        return func(*args, **kwargs)


_results: dict[Hashable, Any] = {}
"""Unknown results of operations, by what their layouts depend on. torch computes most of them in Python, which takes
most of a trace's time, and models repeat their layers."""


def _without_values(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    names, values = tuple(kwargs), tuple(kwargs.values())
    key = (func, torch.get_default_dtype(), names, _layouts(args), _layouts(values)) if _makes_new(func) else None
    if key in _results:
        (result,) = _each(_unknown, (_results[key],))
        return result
    result = _on("meta", func, _each(_shape, args), dict(zip(names, _each(_shape, values), strict=True)))
    if key is not None and len(_results) < _MOST_RESULTS:
        (_results[key],) = _each(_unknown, (result,))
    return result


@functools.cache
def _makes_new(func: Any) -> bool:
    """Returns True if an operation makes no views, and writes to no operand."""
    return all(value.alias_info is None for value in (*func._schema.arguments, *func._schema.returns))


def _layouts(values: Iterable[Any]) -> Hashable:
    """An operation's arguments as far as the layout of its result depends on them."""
    return tuple(
        (value.shape, value.stride(), value.dtype)
        if isinstance(value, Tensor)
        else _layouts(value)
        if isinstance(value, list | tuple)
        else (type(value), value)  # 1 == True == 1.0
        for value in values
    )


def _on(device: str, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    return func(*args, **kwargs | {"device": torch.device(device)} if _takes_device(func) else kwargs)


@functools.cache
def _takes_device(func: Any) -> bool:
    return any(argument.name == "device" for argument in func._schema.arguments)


def _asks_for(kwargs: dict[str, Any], device: str) -> bool:
    return kwargs.get("device") is not None and torch.device(kwargs["device"]).type == device


def _tensors(values: Iterable[Any]) -> list[Tensor]:
    """The tensors among an operation's arguments or results, which may be lists."""
    found = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found += _tensors(value)
    return found


def _each(function: Callable[[Tensor], Tensor], values: Iterable[Any]) -> tuple[Any, ...]:
    """Apply a function to the tensors among an operation's arguments."""

    def one(value: Any) -> Any:
        if isinstance(value, list | tuple):
            return list(_each(function, value))
        return function(value) if isinstance(value, Tensor) else value

    return tuple(map(one, values))


def _shape(tensor: Tensor) -> Tensor:
    return tensor if tensor.is_meta else _unknown(tensor)


def _unknown(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _zeros(tensor: Tensor) -> Tensor:
    """Return zeros in place of an unknown tensor."""
    if not tensor.is_meta:
        return tensor
    if tensor.numel() > _MOST_VALUES:
        raise UnsupportedModelError(f"the model looks at the values of a tensor of shape {list(tensor.shape)}")
    return torch.zeros(tensor.shape, dtype=tensor.dtype, device="cpu")


@contextlib.contextmanager
def isolated() -> Iterator[None]:
    """Make torch's settings and all random numbers the same in each process, and restore the caller's afterwards."""
    dtype, python, numpy = torch.get_default_dtype(), random.getstate(), np.random.get_state()
    with (
        torch.random.fork_rng(devices=[]),
        torch.inference_mode(False),
        torch.no_grad(),
        torch.autocast("cpu", enabled=False),
    ):
        try:
            torch.set_default_dtype(torch.float32)
            torch.default_generator.manual_seed(0)  # `torch.manual_seed` would seed GPUs, too, and for good
            random.seed(0)
            np.random.seed(0)
            yield
        finally:
            torch.set_default_dtype(dtype)
            random.setstate(python)
            np.random.set_state(numpy)


def forget_parameters(model: nn.Module) -> None:
    """Make the parameters of a model unknown. Tied parameters stay tied."""
    twins: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and not parameter.is_meta:
                if parameter not in twins:
                    twins[parameter] = nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=False)
                module._parameters[name] = twins[parameter]
