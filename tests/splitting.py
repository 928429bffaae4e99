"""Split models, their logits, and what they ask their backend for."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from symbiosis_priv.arithmetic.ring import Direction
from tenant import RemoteConfig, backend_of
from tenant.masking.backend import Product


def split_model(path: Path, *, kind: Any = AutoModelForCausalLM, dtype: Any = torch.float32, **options: Any) -> Any:
    """The model in a folder, in evaluation mode, with options of `RemoteConfig`. Without a federation, it simulates."""
    options.setdefault("masking", "pad" if "federation" in options else "simulate")
    return kind.from_pretrained(path, dtype=dtype, quantization_config=RemoteConfig(**options)).eval()


def logits(model: Any, ids: Tensor) -> Tensor:
    """The logits of a pass without gradients."""
    with torch.no_grad():
        found: Tensor = model(input_ids=ids).logits
    return found


def watched(model: Any, monkeypatch: pytest.MonkeyPatch) -> list[list[Product]]:
    """A list that grows with each call of a model's backend, by the products of this call; their inputs are copies."""
    backend, calls = backend_of(model), list[list[Product]]()
    one, several = backend.multiply, backend.multiply_all

    def copied(product: Product) -> Product:
        return product._replace(inputs=[part.detach().clone() for part in product.inputs])

    def multiply(index: int, direction: Direction, inputs: Any, outputs: Any, *, counts: Any = None) -> None:
        calls.append([copied(Product(index, direction, inputs, outputs, counts))])
        one(index, direction, inputs, outputs, counts=counts)

    def multiply_all(products: Sequence[Product]) -> None:
        calls.append([copied(product) for product in products])
        several(products)

    monkeypatch.setattr(backend, "multiply", multiply)
    monkeypatch.setattr(backend, "multiply_all", multiply_all)
    return calls
