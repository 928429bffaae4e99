"""One pass of a model over tokens of many sequences."""

from pathlib import Path
from typing import Any
from unittest import mock

import torch

from tenant import RemoteConfig
from tenant.endpoint.engine.kv import BLOCK
from tenant.endpoint.engine.packed_model import NextTokens, PackedModel
from tenant.model.hf import backend_of
from tenant.model.loading import load_language_model
from tests.tenant.endpoint.long_context import small_model


def test_a_prompt_read_in_chunks_has_the_bits_of_one_pass() -> None:
    """And the logits of transformers' own pass, in float64. There, fewer than 10^4 roundings of 2^-53 stand one after
    another behind a logit; norms and softmax enlarge an error less than a thousandfold."""
    length = 2 * BLOCK + 60
    model = small_model(length).double()
    tokens = torch.randint(3, 320, (length,), generator=torch.Generator().manual_seed(1)).tolist()
    with torch.no_grad():
        own = model(input_ids=torch.tensor([tokens])).logits[0]
    packed = PackedModel(model)
    ((uncut, _),) = packed([NextTokens(kv=packed.new_kv(), tokens=tokens, logits=length)])
    kv, found = packed.new_kv(), []
    for size in (1, 2, BLOCK - 5, 3, 200, length):
        chunk = tokens[kv.length :][:size]
        ((logits, _),) = packed([NextTokens(kv=kv, tokens=chunk, logits=len(chunk))])
        found.append(logits)
    packed.close()
    assert torch.equal(torch.cat(found), uncut)
    assert (uncut - own).abs().max() <= 1e7 * 2**-53 * own.abs().max()


def test_products_run_outside_the_mode_for_local_functions(checkpoint: Path) -> None:
    """The mode is entered at each call of torch, and a product of a small layer makes a hundred of them."""
    model = load_language_model(checkpoint, remote=RemoteConfig(masking="simulate"))
    packed, backend, inside = PackedModel(model), backend_of(model), []

    def multiply(*args: Any, **said: Any) -> None:
        inside.append(torch._C._is_torch_function_all_disabled())
        type(backend).multiply(backend, *args, **said)

    with mock.patch.object(backend, "multiply", multiply):
        packed([NextTokens(kv=packed.new_kv(), tokens=[1, 2])])
    packed.close()
    assert inside == [True] * len(backend.facts)
