"""LoRA that reads the base weight of offloaded layers: PiSSA and OLoRA at their start, and DoRA.

PiSSA and OLoRA move a low-rank part of the base weight into the adapter: PEFT subtracts `s B0 A0` from the weight. An
offloaded layer subtracts the product instead: `W x - s B0 A0 x + s B A x`. The saved folder is the same as PEFT's.

DoRA (Liu et al. 2024, arXiv:2402.09353): each row of `W + s B A` is scaled to a trained magnitude, so every step needs
the norms of the rows:

    |W + s B A|^2 = |W|^2 + 2 s (W A^T . B) + s^2 (B A A^T . B)

The norms of the rows of `W`, which is the rounded weight that providers multiply by, are computed once. `W A^T` changes
with `A`, that is once per optimizer step. Computing it on the tenant would read the whole checkpoint in every step. So
the r rows of `A` are sent with the next forward request of the layer group. They are private, and are masked and
verified like all rows. Executors see r more rows per adapted linear in one request of a step, and none while `A` does
not change.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from peft import PeftType
from peft.tuners.lora import LoraModel
from peft.tuners.lora.dora import DoraLinearLayer
from torch import Tensor, nn
from torch.nn import functional

from symbiosis_priv.errors import UnsupportedMethodError
from tenant.model.offloaded import LORA_STARTS
from tenant.model.remote_linear import RemoteLayer
from tenant.tasks.methods.layer import adapted, use_instead


class RemoteDora(DoraLinearLayer):
    """Computes the term that DoRA adds to the output of an offloaded layer. Replaces PEFT's module of one adapter. Make
    it while the base weight can be read."""

    squares: Tensor

    def __init__(self, module: Any, adapter: str, layer: RemoteLayer) -> None:
        super().__init__(fan_in_fan_out=module.fan_in_fan_out)  # type: ignore[no-untyped-call]
        self.weight = module.lora_magnitude_vector[adapter].weight
        weight, a, b = layer.base_weight(rounded=True), module.lora_A[adapter].weight, module.lora_B[adapter].weight
        if not self.weight.is_meta:  # PEFT has computed it from the checkpoint's weight, so the start would differ
            scaling = module.scaling[adapter]
            norm = self.get_weight_norm(weight, (b @ a).detach().float(), scaling)
            self.weight.data = norm.to(self.weight)
        by_row = weight.t() if self.fan_in_fan_out else weight
        self.register_buffer("squares", by_row.square().sum(1), persistent=False)
        self._rows_of_a = RowsOfA(module, adapter, layer.member)
        layer.group.adapter_rows.add(self._rows_of_a)

    def forward(
        self,
        x: Tensor,
        *,
        lora_A: Any,
        lora_B: Any,
        scaling: float,
        base_layer: Any,
        base_result: Tensor | None = None,
        adapter_name: str = "default",
    ) -> Tensor:
        """Return the term to add to the base layer's output `[..., o]`; see PEFT's class.

        With dropout, `x` differs from the base layer's input, so `x` needs another request.
        """
        norm = self._norm(lora_A.weight, lora_B.weight, scaling, base_layer).to(x.dtype)
        scale = (self.weight / norm).view(1, -1)
        if base_result is None:
            base_result = base_layer(x)
        if base_layer.bias is not None:
            base_result = base_result - base_layer.bias
        added: Tensor = (scale - 1) * base_result + scale * lora_B(lora_A(x)) * scaling
        return added

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # what rides along arrives outside the graph
    @torch.no_grad()
    def _norm(self, a: Tensor, b: Tensor, scaling: float, layer: RemoteLayer) -> Tensor:
        """Return the norms of the rows of `W + s B A`, float32 `[o]`. As in PEFT, no gradient flows through them."""
        if self._rows_of_a.rows() is not None:
            layer(a)  # the layer's output came from a request that did not include the rows of `A`
        image = self._rows_of_a.image - (0 if layer.bias is None else layer.stored_bias().to(a.device))
        a, b = a.to(torch.float32), b.to(torch.float32)
        for part in layer.moved or ():
            image = image - part(a)
        squares = self.squares + 2 * scaling * (image.t() * b).sum(1) + scaling**2 * (b @ (a @ a.t()) * b).sum(1)
        return squares.clamp(min=0).sqrt()


class RowsOfA:
    """The rows of an adapter's `A`, which are sent with the next request once their values have changed."""

    def __init__(self, module: Any, adapter: str, member: int) -> None:
        self.member = member
        self.image = torch.empty(0, dtype=torch.float32, device="cpu")
        self._module, self._adapter = module, adapter
        self._sent = torch.empty(0, dtype=torch.float32, device="cpu")

    def rows(self) -> Tensor | None:
        """Return float rows `[r, d]` to send with the next request, or None."""
        module = self._module
        if self._adapter not in module.active_adapters or module.disable_adapters:
            return None
        a, sent = self._a(), self._sent
        same = (a.shape, a.dtype, a.device) == (sent.shape, sent.dtype, sent.device) and torch.equal(a, sent)
        return None if same else a

    def take(self, product: Tensor) -> None:
        """Receive the member's output `[r, o]`, with bias, for the rows that were sent."""
        self.image, self._sent = product.to(torch.float32), self._a().clone()

    def _a(self) -> Tensor:
        a: Tensor = self._module.lora_A[self._adapter].weight.detach()
        return a


class LowRank(nn.Module):
    """The frozen matrix `scaling * b @ a`, for a `[r, d]` and b `[o, r]`."""

    a: Tensor
    b: Tensor

    def __init__(self, a: Tensor, b: Tensor, scaling: float) -> None:
        super().__init__()
        self.register_buffer("a", a.detach().clone(), persistent=False)
        self.register_buffer("b", b.detach().clone(), persistent=False)
        self.scaling = scaling

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(functional.linear(x.to(self.a.dtype), self.a), self.b) * self.scaling

    def delta(self) -> Tensor:
        """Return the matrix `[o, d]`."""
        return self.scaling * self.b @ self.a


class RemoteLora(LoraModel):
    """LoRA on offloaded layers, with the starts that need the base weight."""

    def _create_and_replace(self, *args: Any, **kwargs: Any) -> None:
        config, adapter, target, name, parent = args[:5]
        layer, start = adapted(target), str(config.init_lora_weights).lower()
        if not isinstance(layer, RemoteLayer):
            super()._create_and_replace(*args, **kwargs)
            return
        if start.startswith(("corda", "mica")):
            raise UnsupportedMethodError(layer.weight.refusal(f"LoRA with init_lora_weights={start!r}", LORA_STARTS))
        moves = start.startswith(("pissa", "olora"))
        with _weight_at_hand(layer) if moves or config.use_dora else nullcontext():
            super()._create_and_replace(*args, **kwargs)
            module = getattr(parent, name)
            if moves:
                a, b = module.lora_A[adapter].weight, module.lora_B[adapter].weight
                layer.moved = nn.ModuleList([*(layer.moved or ()), LowRank(a, b, module.scaling[adapter])])
            if config.use_dora:
                module.lora_magnitude_vector[adapter] = RemoteDora(module, adapter, layer)


@contextmanager
def _weight_at_hand(layer: RemoteLayer) -> Iterator[None]:
    """Context manager: put the base weight into `layer.weight`. Changes to the weight have no effect. Raises
    `UnsupportedMethodError` if there is no full checkpoint on the tenant's disk; `CheckpointError` if the checkpoint is
    not that of the federation."""
    absent = layer._parameters["weight"]
    # not by attribute: PEFT may have replaced `register_parameter` to make its own parameters on the meta device
    layer._parameters["weight"] = nn.Parameter(layer.base_weight().clone(), requires_grad=False)
    try:
        yield
    finally:
        layer._parameters["weight"] = absent


use_instead(PeftType.LORA, RemoteLora)
