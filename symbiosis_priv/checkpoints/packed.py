"""Packed weights on disk: written once, then mapped. A start copies nothing, and processes share the pages.

Theory of operation. A file holds one layer group in one layout, and the group's digest in its header. Hashing gigabytes
would make every start slow, so damage is noticed in another way before the first product is served: the file also holds
the products of a public probe row, computed from the quantised weights with torch, and the reader computes them again
(`agrees`). Every entry of the probe is odd, and so a unit of the ring: one altered weight always changes a product, and
several rarely cancel out. This also tests the kernel on the real matrix. It does not protect against a user that can
write to the cache: the folder belongs to the operator, and tenants verify every answer.
"""

import functools
import struct
from pathlib import Path

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.nn.functional import pad

from symbiosis_priv.arithmetic.ring import DIRECTIONS, Direction
from symbiosis_priv.kernels import KERNELS, Kernel, Packed, RingMatrix, probe_rows
from symbiosis_priv.system.files import write_atomically

_ALIGNMENT = 64  # bytes: the size of a cache line and of the widest vector
_LENGTH = struct.Struct("<Q")  # version of the header
_VERSION = 2  # version of the files and of every layout
_DTYPES = {torch.int8: "I8", torch.int16: "I16", torch.int32: "I32"}

Products = dict[Direction, Tensor]  # products of the probe row: two int32 `[columns]`


def path_of(folder: Path, digest: str, layout: str) -> Path:
    """The file of a group, by the group's digest in the manifest."""
    return folder / f"{digest}-{layout}-{_VERSION}.safetensors"


@functools.lru_cache(maxsize=64)
def probe(width: int) -> Tensor:
    """The public probe row, int32 `[1, width]`, every entry odd. All callers share it, and none changes it."""
    return probe_rows(3, width)[1:2] | 1


def probe_products(weight: Tensor, *, weight_bits: int) -> Products:
    """The products of the public probe row (`probe`) with int16 weights `[o, d]`, in both directions."""
    kernel = KERNELS["plain"]
    packed = Packed(kernel.layout, weight.shape[0], weight.shape[1], weight_bits, weight)
    products: Products = {}
    for direction in DIRECTIONS:
        width, columns = packed.columns(direction)
        out = torch.empty((1, columns), dtype=torch.int32, device="cpu")
        kernel.product(packed, probe(width), direction, out)
        products[direction] = out[0]
    return products


def agrees(matrix: RingMatrix, products: Products) -> bool:
    """Returns True if a matrix has these products of the probe row: its weights are intact and its kernel is exact."""
    return all(
        torch.equal(matrix.product(probe(matrix.columns(direction)[0]), direction)[0].cpu(), products[direction])
        for direction in DIRECTIONS
    )


def write(folder: Path, digest: str, packed: Packed, products: Products) -> None:
    """Write a packed group atomically. Raises `OSError`: no room, or no permission."""
    # safetensors' own writer is not used: it copies the data once more, and aligns it to 8 bytes only
    tensors = {str(direction): pad(product, (0, -len(product) % _ALIGNMENT)) for direction, product in products.items()}
    tensors["weight"] = packed.data
    header: dict[str, object] = {"__metadata__": _metadata(digest, packed)}
    end = 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.nbytes
        header[name] = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = msgspec.json.encode(header)
    text += b" " * (-(len(text) + _LENGTH.size) % _ALIGNMENT)
    parts = (tensor.contiguous().numpy().data.cast("B") for tensor in tensors.values())
    write_atomically(path_of(folder, digest, packed.layout), _LENGTH.pack(len(text)), text, *parts)


def read(folder: Path, digest: str, kernel: Kernel, *, weight_bits: int) -> tuple[Packed, Products] | None:
    """Map a packed group in the layout of a kernel. Returns None if its file is missing, truncated, or of another
    group."""
    path = path_of(folder, digest, kernel.layout)
    if not path.is_file():  # opening a pipe would block
        return None
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata()
            outputs, inputs = int(metadata["outputs"]), int(metadata["inputs"])
            packed = Packed(kernel.layout, outputs, inputs, weight_bits, file.get_tensor("weight"))
            products: Products = {
                direction: file.get_tensor(direction)[: packed.columns(direction)[1]] for direction in DIRECTIONS
            }
    except (OSError, SafetensorError, KeyError, ValueError, TypeError):
        return None
    # kernels read this many bytes without a check
    form = kernel.form(outputs, inputs, weight_bits=weight_bits)
    whole = metadata == _metadata(digest, packed) and form == (packed.data.dtype, tuple(packed.data.shape))
    return (packed, products) if whole else None


def _metadata(digest: str, packed: Packed) -> dict[str, str]:
    sizes = {name: str(getattr(packed, name)) for name in ("outputs", "inputs", "weight_bits")}
    return {"digest": digest, "layout": packed.layout, **sizes}
