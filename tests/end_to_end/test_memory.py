"""The tenant never holds an offloaded weight: neither after loading, nor during training, nor for a moment."""

import gc
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from symbiosis_priv.checkpoints.weights import WeightStore
from symbiosis_priv.harness.local import LocalFederation
from tenant import backend_of
from tenant.model.remote_linear import RemoteLayer
from tests.end_to_end.conftest import Open, config_for

IDS = torch.arange(3, 3 + 2 * 11).view(2, 11)


def offloaded_sizes(path: Path) -> tuple[set[int], int]:
    """Elements of every offloaded weight, alone and stacked with its siblings; and separately of the head.

    Except for the embedding, which is as large as the head, none of the tenant's own tensors has as many elements.
    """
    *blocks, head = WeightStore(path).manifest().groups
    return {
        entry.inputs * n for entry in blocks for n in (*entry.outputs, entry.stacked_outputs)
    }, head.inputs * head.stacked_outputs


def alive(*sizes: int) -> list[Tensor]:
    """All tensors in this process with these numbers of elements, and with these numbers of bytes."""
    gc.collect()
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1.0)  # another thread cannot go on with a tuple that is in the list of all objects
    try:
        time.sleep(0.01)  # threads that wait with the old interval go first
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # reading the class of some objects logs a warning
            tensors = [o for o in gc.get_objects() if isinstance(o, Tensor)]
    finally:
        sys.setswitchinterval(interval)
    return [t for t in tensors if not t.is_meta and t.nbytes and t.numel() in sizes]


def new(before: list[Tensor], *sizes: int) -> list[tuple[int, ...]]:
    """Shapes of the tensors that did not exist in `before`, which may hold tensors of earlier tests."""
    known = {id(t) for t in before}
    return [tuple(t.shape) for t in alive(*sizes) if id(t) not in known]


class Watch(TorchDispatchMode):
    """Records every tensor that any operation makes."""

    def __init__(self, sizes: set[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.sizes = sizes
        self.suspects: list[str] = []
        self.made = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor) and not leaf.is_meta:
                self.made += 1
                if leaf.numel() in self.sizes:
                    self.suspects.append(f"{func} {tuple(leaf.size())}")
        return out


def test_the_checks_find_an_offloaded_weight(llama: Path) -> None:
    sizes, _ = offloaded_sizes(llama)
    before = alive(*sizes)
    kept = WeightStore(llama).group(0).weight
    assert tuple(kept.shape) in new(before, *sizes)
    with Watch(sizes) as watch:
        kept.to(torch.float32)
    assert len(watch.suspects) == 1


def test_no_offloaded_weight_ever_exists(llama: Path, llama_federation: LocalFederation, open_model: Open) -> None:
    sizes, head = offloaded_sizes(llama)
    before = alive(*sizes, head)
    config = config_for(llama_federation, "pad-1", pool_memory_mib=0)  # parts of pads may have any size
    backend_of(open_model(llama, config, adapter=False)).close()  # makes facts and keys, once, layer by layer
    assert new(before, *sizes) == []
    with Watch(sizes) as watch:
        model = open_model(llama, config)
    assert new(before, *sizes) == []
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    with watch:
        for _ in range(2):
            model(input_ids=IDS, labels=IDS).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        model.generate(input_ids=IDS, max_new_tokens=3, do_sample=False, pad_token_id=0)
    assert new(before, *sizes) == []
    assert new(before, head) == [tuple(model.get_input_embeddings().weight.shape)]
    assert watch.made > 1000
    assert watch.suspects == []
    remote = [m for m in model.modules() if isinstance(m, RemoteLayer)]
    assert len(remote) == 2 * 7 + 1
    held = [t for m in remote for t in (*m.parameters(), *m.buffers(), *vars(m).values()) if isinstance(t, Tensor)]
    assert sum(t.untyped_storage().nbytes() for t in held) == 0
