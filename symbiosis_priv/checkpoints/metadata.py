"""Names the operations that read a tensor's metadata (shape, dtype, device, ...) and none of its values.

The names are those of torch's functions, methods and attributes. A linear can be offloaded if the model uses its weight
only through these operations, because the placeholder for its weight supports no others.
"""

from collections.abc import Callable
from typing import Any

ATTRIBUTES = frozenset(
    (
        *("dtype", "device", "layout", "shape", "ndim", "nbytes", "itemsize"),
        *("requires_grad", "grad", "grad_fn", "is_leaf", "retains_grad", "_version", "_backward_hooks"),
        *("is_meta", "is_cpu", "is_cuda", "is_mps", "is_xpu", "is_xla", "is_sparse", "is_nested", "is_quantized"),
    )
)
METHODS = frozenset(
    (
        *("size", "dim", "ndimension", "numel", "nelement", "element_size", "__len__", "__hash__"),
        *("is_floating_point", "is_complex", "is_contiguous", "data_ptr", "untyped_storage", "storage_offset"),
        "_has_compatible_shallow_copy_type",
    )
)


def called(func: Callable[..., Any]) -> str:
    """The name under which `__torch_function__` was called: `clone`, or `dtype.__get__` for an attribute."""
    name = getattr(func, "__name__", "")
    owner = getattr(getattr(func, "__self__", None), "__name__", "")
    return f"{owner}.{name}" if name in ("__get__", "__set__", "__delete__") else name


def is_metadata(name: str) -> bool:
    """Returns True if an operation of this name reads no value and changes nothing."""
    attribute, _, access = name.partition(".")
    return attribute in ATTRIBUTES and access == "__get__" if access else name in METHODS
