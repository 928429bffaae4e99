"""`RemoteLinear` and `RemoteConv1D`: the modules that replace an offloaded `nn.Linear` or `Conv1D`.

Siblings (q/k/v, gate/up) are called one after the other with the same tensor. The first call sends the whole group as
one request, and the calls of the other siblings return their parts of the result. So a group costs one round trip and
one mask (rule 4) in each direction. Two calls have the same input if the tensor object and its version are the same;
two tensors with equal values are different inputs. A tensor made in inference mode has no version, so its values are
compared with a copy. Like autograd, this module does not notice a write through `x.data` between siblings.

The forward pass saves nothing for backward: the input's gradient is `g @ W`, which needs neither input nor output. Its
own derivative, for gradients of gradients, is the forward product without the bias: a request like others.

A tied LM head may be offloaded as well (`untie_head`). Providers multiply by the table of the checkpoint, so the
tenant's embedding table, which stays for look-ups, must not change: it is frozen, and the head raises an error if the
table was trained or resized.

Under `torch.compile`, the product of a group is one node of the graph. Dynamo cannot trace sockets, threads and native
code, and each call that it cannot trace breaks the graph. So `group_output` is marked `allow_in_graph`, and Dynamo does
not trace into it. AOTAutograd and Inductor then run the Python code of `LayerGroup` with fake tensors. Siblings share
one group call as in eager mode, and only the product becomes an operator, which runs when the graph runs. Operators
take no Python objects, so an integer handle identifies a group.

The bias is public. The product includes the checkpoint's bias, and a layer adds the difference that training has made.
"""

import copy
import itertools
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from symbiosis_priv.arithmetic.ring import BACKWARD, FORWARD, Direction
from symbiosis_priv.arithmetic.segments import Counts
from symbiosis_priv.errors import NonFiniteError, UnsupportedMethodError
from tenant.masking.backend import Backend
from tenant.model.connect import BaseWeights
from tenant.model.offloaded import OffloadedConv1DWeight, OffloadedWeight

_groups: weakref.WeakValueDictionary[int, "LayerGroup"] = weakref.WeakValueDictionary()
_handles = itertools.count()


class LayerGroup:
    """The linears of one layer group. Calls the backend once per distinct input. `weights` reads base weights; None
    without a checkpoint. `row_bucket`: rows for single experts are sent in multiples of it. `trip` is the `trips.Trip`
    that computes products without gradients, if there is one; a copied model has none. `adapter_rows` are rows of
    adapters (`methods.lora.RowsOfA`) that are sent with a forward request, masked and verified like all rows."""

    trip: Any = None

    def __init__(
        self, backend: Backend, index: int, weights: BaseWeights | None = None, *, row_bucket: int = 1
    ) -> None:
        self.backend = backend
        self.index = index
        self.weights = weights
        self.row_bucket = row_bucket
        self.inputs = backend.facts[index].entry.inputs
        self.adapter_rows: weakref.WeakSet[Any] = weakref.WeakSet()
        self._outputs = backend.facts[index].entry.outputs
        self._thread_state = _ThreadState()
        self.handle = next(_handles)
        _groups[self.handle] = self

    def output(self, x: Tensor, member: int) -> Tensor:
        """Return one member's output `[..., o]` for input x `[..., d]`, in x's dtype (in autocast's, if enabled)."""
        state = self._thread_state
        with torch._C.DisableTorchFunction():  # a torch function mode of the caller would delay each call
            pending = state.pending
            if pending is None or not pending.is_for(x) or pending.parts[member] is None:
                if self.trip is not None and type(x) is Tensor and not torch.is_grad_enabled():
                    together: Tensor | None = self.trip.send(x)
                    if together is not None:
                        return together
                parts: tuple[Tensor, ...]
                # `apply` is slow (docs/adr/9-lane.md)
                parts = _GroupLinear.apply(x, self, None) if torch.is_grad_enabled() else _computed(self, x)  # type: ignore[no-untyped-call]
                if len(parts) == 1:  # there are no siblings
                    return parts[0]
                pending = state.pending = _Pending(x, list(parts))
            part, pending.parts[member] = pending.parts[member], None
            pending.left -= 1
            if not pending.left:
                state.pending = None
            assert part is not None
            return part

    def set_output(self, x: Tensor, parts: list[Tensor]) -> None:
        """Set each member's output for input x, which this thread will ask for next."""
        self._thread_state.pending = _Pending(x, [*parts])

    def shapes(self, x: Tensor) -> list[tuple[int, ...]]:
        """Return the shape of each member's output for input `x`."""
        return [(*x.shape[:-1], width) for width in self._outputs]

    def forward(self, x: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """Compute each member's output, in `dtype`, with one backend call."""
        if len(self.adapter_rows) and (
            sent := [(r, extra) for r in self.adapter_rows if (extra := r.rows()) is not None]
        ):
            return self._forward_with(sent, x, dtype)
        parts = self.backend.forward_few(self.index, x, dtype)
        if parts is None:
            # separate tensors, not views of one: callers may write to them
            parts = [torch.empty(shape, dtype=dtype, device=x.device) for shape in self.shapes(x)]
            outputs = [part.view(-1, width) for part, width in zip(parts, self._outputs, strict=True)]
            self.backend.multiply(self.index, FORWARD, [x.reshape(-1, x.shape[-1])], outputs)
        return tuple(parts)

    def _forward_with(self, sent: list[tuple[Any, Tensor]], x: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """Compute the outputs of `x` and of the adapter rows with one backend call, in the wider of the dtypes."""
        wide = torch.promote_types(dtype, torch.float32)
        own = x.reshape(-1, x.shape[-1])
        rows = torch.cat([own.to(wide), *(extra.to(wide) for _, extra in sent)])
        parts = [torch.empty((len(rows), width), dtype=wide, device=x.device) for width in self._outputs]
        self.multiply(FORWARD, [rows], parts)
        start = len(own)
        for source, extra in sent:
            source.take(parts[source.member][start : start + len(extra)])
            start += len(extra)
        return tuple(
            part[: len(own)].clone().to(dtype).view(shape) for part, shape in zip(parts, self.shapes(x), strict=True)
        )

    def backward(self, grads: tuple[Tensor, ...], dtype: torch.dtype) -> Tensor:
        """Compute the input's gradient, in `dtype`, from all members' output gradients, with one backend call."""
        rows = [grad.reshape(-1, grad.shape[-1]) for grad in grads]
        grad_x = torch.empty((*grads[0].shape[:-1], self.inputs), dtype=dtype, device=grads[0].device)
        self.multiply_gradients(BACKWARD, rows, [grad_x.view(len(rows[0]), self.inputs)])
        return grad_x

    def without_bias(self, x: Tensor, dtypes: Sequence[torch.dtype]) -> tuple[Tensor, ...]:
        """Compute each member's product without the bias: the derivative of `backward` for a gradient `x`."""
        bias = self.backend.facts[self.index].bias
        wide = x.dtype if bias is None else torch.float64  # the bias may be much larger than the product
        parts = [torch.empty(shape, dtype=wide, device=x.device) for shape in self.shapes(x)]
        rows = [part.view(-1, width) for part, width in zip(parts, self._outputs, strict=True)]
        self.multiply_gradients(FORWARD, [x.reshape(-1, x.shape[-1])], rows)
        if bias is not None:
            own = bias.to(dtype=wide, device=x.device).split(list(self._outputs))
            parts = [part - its_bias for part, its_bias in zip(parts, own, strict=True)]
        return tuple(part.to(dtype) for part, dtype in zip(parts, dtypes, strict=True))

    def multiply(
        self, direction: Direction, inputs: Sequence[Tensor], outputs: Sequence[Tensor], *, counts: Counts | None = None
    ) -> None:
        """Call the backend; see `Backend.multiply`."""
        self.backend.multiply(self.index, direction, inputs, outputs, counts=counts)

    def multiply_gradients(
        self, direction: Direction, inputs: Sequence[Tensor], outputs: Sequence[Tensor], *, counts: Counts | None = None
    ) -> None:
        """`multiply` gradients. The product of a row with inf or nan is nan, so that a loss scaler skips the step.
        Zeros are sent in its place: providers do not see that a gradient has left the range of float16."""
        try:
            self.multiply(direction, inputs, outputs, counts=counts)
        except NonFiniteError:
            lost = ~torch.stack([rows.isfinite().all(dim=1) for rows in inputs]).all(dim=0, keepdim=True).T
            self.multiply(direction, [rows.masked_fill(lost, 0) for rows in inputs], outputs, counts=counts)
            for out in outputs:
                out.masked_fill_(lost, torch.nan)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        # a copied model shares the session, not the pending outputs
        twin = memo[id(self)] = type(self)(self.backend, self.index, self.weights, row_bucket=self.row_bucket)
        for source in self.adapter_rows:
            twin.adapter_rows.add(copy.deepcopy(source, memo))
        return twin


class _Pending:
    """The outputs of a group call that siblings have not returned yet."""

    def __init__(self, x: Tensor, parts: list[Tensor | None]) -> None:
        self._x = weakref.ref(x)
        self._state = _state(x)
        self._copy = x.clone() if x.is_inference() and len(parts) > 1 else None
        self.parts, self.left = parts, len(parts)

    def is_for(self, x: Tensor) -> bool:
        if self._x() is not x or self._state != _state(x):
            return False
        return self._copy is None or torch.equal(self._copy, x)


class _ThreadState(threading.local):
    """The pending outputs of a group, per thread, because each thread runs the model on its own input."""

    pending: _Pending | None = None


def _state(x: Tensor) -> tuple[object, ...]:
    """Return what a group's outputs depend on besides the tensor object: version, gradient modes and dtype."""
    version = None if x.is_inference() else x._version
    modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    return version, x.requires_grad, modes, output_dtype(x)


def output_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype of a product of `x`: autocast's if autocast is enabled, else that of `x`."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


@torch.compiler.allow_in_graph  # type: ignore[untyped-decorator]
def group_output(x: Tensor, handle: int, member: int) -> Tensor:
    """Call `LayerGroup.output` of the group with this handle."""
    return _groups[handle].output(x, member)


def _computed(group: LayerGroup, x: Tensor) -> tuple[Tensor, ...]:
    """Call `group.forward`: directly for a plain tensor, as an operator for the fake tensors of tracing."""
    dtype = output_dtype(x)
    return group.forward(x, dtype) if type(x) is Tensor else tuple(_forward(x, group.handle, dtype))


@torch.library.custom_op("symbiosis_priv::group_forward", mutates_args=())
def _forward(x: Tensor, handle: int, dtype: torch.dtype) -> list[Tensor]:
    return list(_groups[handle].forward(x, dtype))


@_forward.register_fake
def _(x: Tensor, handle: int, dtype: torch.dtype) -> list[Tensor]:
    return [x.new_empty(shape, dtype=dtype) for shape in _groups[handle].shapes(x)]


@torch.library.custom_op("symbiosis_priv::group_backward", mutates_args=())
def _backward(grads: list[Tensor], handle: int, dtype: torch.dtype) -> Tensor:
    return _groups[handle].backward(tuple(grads), dtype)


@_backward.register_fake
def _(grads: list[Tensor], handle: int, dtype: torch.dtype) -> Tensor:
    return grads[0].new_empty((*grads[0].shape[:-1], _groups[handle].inputs), dtype=dtype)


class _GroupLinear(torch.autograd.Function):
    """The members' outputs; with `dtypes`, which are those of the results, without their biases."""

    @staticmethod
    def forward(x: Tensor, group: LayerGroup, dtypes: Sequence[torch.dtype] | None) -> tuple[Tensor, ...]:
        return _computed(group, x) if dtypes is None else group.without_bias(x, dtypes)

    @staticmethod
    def setup_context(
        ctx: Any, inputs: tuple[Tensor, LayerGroup, Sequence[torch.dtype] | None], output: tuple[Tensor, ...]
    ) -> None:
        x, ctx.group, _ = inputs
        ctx.dtype = x.dtype

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        if torch.is_grad_enabled():  # with create_graph=True
            return _InputGradient.apply(ctx.group, ctx.dtype, *grads), None, None  # type: ignore[no-untyped-call]
        return _input_gradient(ctx.group, ctx.dtype, *grads), None, None


class _InputGradient(torch.autograd.Function):
    """The input's gradient as a function of the outputs' gradients."""

    @staticmethod
    def forward(group: LayerGroup, dtype: torch.dtype, *grads: Tensor) -> Tensor:
        return _input_gradient(group, dtype, *grads)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.group, _, *grads = inputs
        ctx.dtypes = [grad.dtype for grad in grads]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *_GroupLinear.apply(grad, ctx.group, ctx.dtypes)  # type: ignore[no-untyped-call]


def _input_gradient(group: LayerGroup, dtype: torch.dtype, *grads: Tensor) -> Tensor:
    if all(type(grad) is Tensor for grad in grads):
        return group.backward(grads, dtype)
    traced: Tensor = _backward(list(grads), group.handle, dtype)
    return traced


class RemoteLayer(nn.Module):
    """A frozen linear whose weight is at the providers. PEFT treats it as the class that it replaces. `moved`: low-rank
    parts of the base weight that an initialisation has moved into an adapter (PiSSA), or None. Their products are
    subtracted from the output. `tasks`: returns the output of the tasks in this forward pass for a product
    (`tenant.tasks`), or None."""

    weight: OffloadedWeight
    bias: nn.Parameter | None
    _is_hf_initialized = True  # transformers must not initialise the layer: some models compute with its parameters

    def __init__(self, *, weight: OffloadedWeight, bias: bool, group: LayerGroup, member: int) -> None:
        nn.Module.__init__(self)
        self.group, self.member = group, member
        self.weight = weight
        self.bias = nn.Parameter(self.stored_bias(), requires_grad=False) if bias else None
        self.moved: nn.ModuleList | None = None
        self.tasks: Callable[[nn.Module, Tensor], Tensor] | None = None
        self._bias_trained = False
        if self.bias is not None:
            self.bias._is_hf_initialized = True  # type: ignore[attr-defined]  # transformers must not initialise it

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "weight" and not isinstance(value, OffloadedWeight):
            raise UnsupportedMethodError(
                "the weight of an offloaded layer cannot be replaced: it stays at the providers. To tie or resize the "
                "embeddings of a model whose tied LM head is offloaded, load it with RemoteConfig(tied_head=False)"
            )
        super().__setattr__(name, value)

    def stored_bias(self) -> Tensor:
        """Return the checkpoint's bias, float32 `[o]`, which the product includes."""
        facts = self.group.backend.facts[self.group.index]
        assert facts.bias is not None
        start = sum(facts.entry.outputs[: self.member])
        return facts.bias[start : start + facts.entry.outputs[self.member]].to(torch.float32)

    def load_bias(self, *, dtype: torch.dtype, device: torch.device) -> None:
        """Load the checkpoint's bias, after the tenant's own parameters were loaded."""
        if self.bias is not None:
            self.bias = nn.Parameter(self.stored_bias().to(dtype=dtype, device=device), requires_grad=False)

    def base_weight(self, *, rounded: bool = False) -> Tensor:
        """Read the weight from the public checkpoint on disk, with the shape, dtype and device of `weight`; with
        `rounded`, the weight that providers multiply by, in float32. Raises `UnsupportedMethodError`: there is no full
        checkpoint; `CheckpointError`: the checkpoint is not that of the federation."""
        if self.group.weights is None:
            raise UnsupportedMethodError("this model was not loaded from a folder, so its weights cannot be read")
        facts = self.group.backend.facts[self.group.index]
        weight = self.group.weights.read(facts.entry, self.member, rounded=rounded).to(self.weight.device)
        weight = weight if rounded else weight.to(self.weight.dtype)
        part: Any
        for part in self.moved or ():
            weight = weight - part.delta()
        return weight.t() if isinstance(self, Conv1D) else weight

    @property
    def adds(self) -> bool:
        """True if the output may be more than the product."""
        return bool(self.moved or self.tasks) or self._has_other_bias

    @property
    def _has_other_bias(self) -> bool:
        return self.bias is not None and (self._bias_trained or self.bias.requires_grad)

    def forward(self, input: Tensor) -> Tensor:
        if torch.compiler.is_dynamo_compiling():
            y: Tensor = group_output(input, self.group.handle, self.member)
        else:
            y = self.group.output(input, self.member)
        for part in self.moved or ():
            y = y - part(input).to(y.dtype)
        if self.bias is not None and self._has_other_bias:
            self._bias_trained = True
            y = y + (self.bias - self.stored_bias().to(self.bias)).to(y.dtype)
        return y

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        """Save a trained bias only: the other values are at the providers."""
        if self.bias is not None and (self._bias_trained or self.bias.requires_grad):
            destination[f"{prefix}bias"] = self.bias if keep_vars else self.bias.detach()

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, _meta: Any, strict: bool, _missing: Any, unexpected: Any, no: Any
    ) -> None:
        name = f"{prefix}bias"
        if self.bias is not None and name in state_dict:
            if state_dict[name].shape != self.bias.shape:
                no.append(f"{name} is {list(state_dict[name].shape)}, and the layer's bias is {list(self.bias.shape)}")
                return
            with torch.no_grad():
                self.bias.copy_(state_dict[name])
            self._bias_trained = True
        known = name if self.bias is not None else ""
        unexpected.extend(key for key in state_dict if strict and key.startswith(prefix) and key != known)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Copy the layer as part of a model. Copying one layer alone is refused, because PEFT does that to train the
        layer."""
        if not memo:
            raise UnsupportedMethodError(
                "an offloaded layer cannot be trained: its weight stays at the providers. "
                "Name it in target_modules instead of modules_to_save (with a task_type, PEFT adds a classification "
                "head to modules_to_save)"
            )
        twin = memo[id(self)] = type(self).__new__(type(self))
        twin.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return twin

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, group={self.group.index}"


class RemoteLinear(RemoteLayer, nn.Linear):  # type: ignore[misc]  # torch declares a Tensor where it sets a Parameter
    """Replaces an `nn.Linear`."""

    def __init__(self, inputs: int, outputs: int, *, group: LayerGroup, member: int, bias: bool = False) -> None:
        super().__init__(weight=OffloadedWeight((outputs, inputs)), bias=bias, group=group, member=member)
        self.in_features, self.out_features = inputs, outputs


class RemoteConv1D(RemoteLayer, Conv1D):  # type: ignore[misc]
    """Replaces a `Conv1D`, whose weight is transposed. PEFT handles `Conv1D` and `nn.Linear` differently."""

    def __init__(self, inputs: int, outputs: int, *, group: LayerGroup, member: int, bias: bool = True) -> None:
        super().__init__(weight=OffloadedConv1DWeight((inputs, outputs)), bias=bias, group=group, member=member)
        self.nx, self.nf = inputs, outputs


def untie_head(model: PreTrainedModel, tied: Mapping[str, str]) -> list[nn.Module]:
    """Stop transformers from tying an offloaded head to the embeddings on loading. `tied` is from
    `discovery.skeleton.tied_head`. Returns the modules whose `weight` is the head's table; none if the head stays with
    the tenant."""
    tables = []
    for parameter, source in tied.items():
        owner, _, leaf = parameter.rpartition(".")
        head = model.get_submodule(owner)
        if isinstance(head, RemoteLayer):
            del model.all_tied_weights_keys[parameter]
            if leaf == "weight":
                tables.append(model.get_submodule(source.rpartition(".")[0]))
                head.register_forward_pre_hook(_Unchanged(tables[-1]))
    return tables


class _Unchanged:
    """Hook before the head's product: refuses a table that differs from that of the checkpoint."""

    def __init__(self, table: nn.Module) -> None:
        self._table = table

    def __call__(self, head: Any, _: Any) -> None:
        weight = self._table.weight
        if weight.requires_grad or weight.shape != head.weight.shape:
            raise UnsupportedMethodError(
                "the embedding table is also the LM head, whose product is offloaded, so the table cannot be trained "
                "or resized. Freeze it: model.get_input_embeddings().weight.requires_grad_(False); or load the model "
                "with RemoteConfig(tied_head=False)"
            )
