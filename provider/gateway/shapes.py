"""Checks the claims of a matrix's header against the model, the served layers and the limits."""

from typing import NamedTuple, NoReturn

from provider.config.schema import MIB, ProviderConfig
from provider.executor.queues import row_load
from provider.refusal import Refusal
from symbiosis_priv.arithmetic.ring import Widths
from symbiosis_priv.arithmetic.segments import check_counts
from symbiosis_priv.checkpoints.manifest import GroupEntry, Manifest
from symbiosis_priv.errors import RangeError
from symbiosis_priv.network import wire


class Sizes(NamedTuple):
    """The encoding of an accepted request, its sizes in bytes, and its cost.

    Args:
        received: the request's payload.
        product: the product in 32 bits.
        memory: all matrices of the request in memory.
        cost: multiply-adds that the tenant is billed.
    """

    encoding: wire.Encoding
    received: int
    product: int
    memory: int
    cost: int


def sizes_of(request: wire.Execute | wire.Effect, widths: Widths) -> Sizes:
    """The sizes of a request, by the widths that `check_shape` has returned."""
    encoding, rows, (inputs, outputs) = request.encoding, request.rows, widths
    received = 0 if isinstance(request, wire.Effect) else encoding.size(rows, inputs)
    product = wire.RING32.size(rows, outputs)
    # a packed answer and a block are copies, made after the rows' memory is free
    copies = product if wire.may_be_relayed(request) else 0
    copies += encoding.size(rows, outputs) if encoding is wire.RING24 else 0
    memory = product + max(wire.RING32.size(rows, inputs), copies)
    _, cost = row_load(type(request), widths, relayed=wire.may_be_relayed(request))
    return Sizes(encoding, received, product, memory, cost * rows)


def check_shape(binding: wire.Binding, *, config: ProviderConfig, manifest: Manifest, served: range) -> Widths:
    """The columns of the request's and the reply's matrix, of the layer group or of one expert's matrix.

    Raises:
        Refusal: the group is not served, or rows, counts or bytes exceed their limits.
    """
    if binding.group >= len(manifest.groups):
        refuse_bad(f"group {binding.group} is not one of {len(manifest.groups)}")
    stack = manifest.groups[binding.group]
    if binding.group not in served:
        raise Refusal(wire.ErrorCode.NOT_SERVED, f"{stack.name} is not in layers {config.model.layers}")
    if binding.rows > config.limits.max_rows:
        raise Refusal(wire.ErrorCode.TOO_LARGE, f"{binding.rows} rows; at most {config.limits.max_rows}")
    if binding.counts is not None:
        _check_counts(binding, binding.counts, stack)
    columns = entry_of(binding, manifest).columns(binding.direction)
    largest = max(wire.RING32.size(binding.rows, width) for width in columns)
    most = config.limits.max_payload_mib * MIB
    if largest > most:
        raise Refusal(wire.ErrorCode.TOO_LARGE, f"a matrix of {largest} bytes; at most {most}")
    return columns


def entry_of(binding: wire.Binding, manifest: Manifest) -> GroupEntry:
    """The entry with the widths of a request: of its layer group, or of one expert's matrix."""
    return manifest.entry(binding.group, by_expert=binding.counts is not None)


def refuse_bad(detail: str) -> NoReturn:
    """Raises `Refusal` BAD_REQUEST, for a request that no tenant of this release sends."""
    raise Refusal(wire.ErrorCode.BAD_REQUEST, detail)


def _check_counts(binding: wire.Binding, counts: tuple[int, ...], stack: GroupEntry) -> None:
    if stack.experts == 1:
        refuse_bad(f"{stack.name} is not a stack of experts; send no counts")
    if binding.arithmetic != "ring":
        refuse_bad("requests with counts need ring arithmetic")
    try:
        check_counts(counts, experts=stack.experts, rows=binding.rows)
    except RangeError as error:
        refuse_bad(str(error))
