"""A disk image of the stopped machine: the adversary opens the tenant's cache, and has no key from outside. Another
process of the tenant's user can read the same files.

It looks for verification keys, for their column R in hints of `lwe`, and for rows and adapters. P may be public, so the
adversary is given P: with it, the part D of a hint would be `D = delta R` modulo p, as many equations as P has rows.
"""

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from itertools import compress
from pathlib import Path
from types import MappingProxyType
from unittest import mock

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from symbiosis_priv.arithmetic.lattice import HEIGHT, Panels
from symbiosis_priv.arithmetic.modular import PRIME
from symbiosis_priv.arithmetic.ring import FORWARD
from symbiosis_priv.limits import DEFAULT_HINT_BITS, GroupIndex
from symbiosis_priv.system.cache_key import cache_key
from tenant.masking.registry import session_scheme
from tenant.preparation.hints import Hints
from tenant.preparation.keys import prepare
from tenant.preparation.prepared import Preparation
from threat_model.active.same_user import FAULT, TRIES, attack_process
from threat_model.attacks.base import Trial, counted
from threat_model.attacks.recorded_links import solve
from threat_model.evidence.public import Public
from threat_model.evidence.schemes import QUICK_SCHEMES
from threat_model.evidence.truth import Truth
from threat_model.lab import Lab, Workload

_WORK = Workload(steps=1, batch=2, generations=1, prompts=2, new_tokens=2, game_rows=8)
_KEY, _MAC = 32, 32  # bytes
_SEARCHED = 8  # requests, and tensors of the adapter
_SECRETS = "verification keys", "R", "rows", "adapters"


def _trial(adversary: str, fault: str | None, tries: Sequence[str], found: Sequence[str]) -> Trial:
    labels = adversary, fault or "none", ", ".join(tries), ", ".join(found) or "nothing"
    return counted(labels, len(found), len(tries), must_find=fault is not None)


def attack_machine(lab: Lab) -> Iterator[Trial]:
    """Run a tenant with a sealed cache, stop it, and open its cache; and attack a running process. Only on Linux."""
    if sys.platform != "linux":
        return
    for fault in (False, True):
        with tempfile.TemporaryDirectory() as folder:
            found = attack_process(Path(folder), fault=fault)
        yield _trial("a process of its user", FAULT if fault else None, TRIES, found)
    digest, scheme = lab.federation.model_digest, session_scheme("lwe")

    def cell(fault: str | None, truth: Truth, more: Mapping[str, bytes] = MappingProxyType({})) -> Trial:
        own = prepare(lab.store, digest=digest, cache=lab.cache)
        scheme.prepare(own, lab.store, bits=DEFAULT_HINT_BITS, training=False)  # what is missing
        image = {str(path): path.read_bytes() for path in lab.cache.rglob("*") if path.is_file()} | dict(more)
        return _trial("a disk image", fault, _SECRETS, find(image, lab.public, own, truth))

    with ExitStack() as undo:
        scratch = Path(undo.enter_context(tempfile.TemporaryDirectory()))
        (scratch / "symbiosis-priv.cache-key").write_bytes(os.urandom(_KEY))
        undo.callback(cache_key.cache_clear)
        undo.enter_context(mock.patch.dict(os.environ, {"CREDENTIALS_DIRECTORY": str(scratch)}))
        undo.enter_context(mock.patch.object(lab, "cache", scratch / "cache"))
        cache_key.cache_clear()
        shutil.copytree(lab.store.cache, lab.cache / lab.store.cache.name)  # public weights
        own = prepare(lab.store, digest=digest, cache=lab.cache)
        scheme.prepare(own, lab.store, bits=DEFAULT_HINT_BITS, training=True)
        truth = lab.record(next(one for one in QUICK_SCHEMES if one.masking is scheme), _WORK).truth
        yield cell(None, truth)
        kept = [next(iter(truth.calls.values())).rows, truth.adapters[0]]
        yield cell("rows and an adapter are left in the cache", truth, {"kept": b"".join(map(_bytes_of, kept))})
        assert own.folder is not None
        shutil.rmtree(own.folder / f"lwe-{DEFAULT_HINT_BITS}")
        with mock.patch.object(Hints, "_hidden", return_value=0):
            yield cell("hints are in the clear", truth)
    yield cell("the cache has no key from outside", truth)


def find(image: dict[str, bytes], public: Public, own: Preparation, truth: Truth) -> tuple[str, ...]:
    """Search an image. `own` and `truth`, the tenant's own knowledge, give P and the score."""
    keys = set()
    for content in image.values():
        with suppress(SafetensorError, KeyError):  # encrypted, or something else
            keys.add(bytes(load(content)["secret"].tolist()))
    entries = public.manifest.groups
    index = GroupIndex(min(range(len(entries)), key=lambda at: entries[at].stacked_outputs))
    hint = next(content for name, content in image.items() if name.endswith(f"lwe-{DEFAULT_HINT_BITS}/{index}.forward"))
    weight = public.quantised(index).weight.to(torch.int32)
    rows = len(weight) + 4  # more equations than unknowns show whether a solution is right
    product = Hints.find(own).matrix(weight.shape[1]).rows(0, rows) @ weight.t()
    delta = Panels.empty(len(weight), bits=DEFAULT_HINT_BITS).put(0, product)
    values = np.frombuffer(hint[-8 * HEIGHT - _MAC : -_MAC], dtype=np.int64)[:rows, None]
    column = solve(delta.numpy().astype(object), values.astype(object), PRIME)
    whole = b"".join(image.values())
    found = (
        not keys.isdisjoint((own.keys.secret, own.second().secret, own.blame.secret)),
        column is not None and column[:, 0].tolist() == own.keys[index, FORWARD][0].values.tolist(),
        any(_bytes_of(call.rows[0]) in whole for call in list(truth.calls.values())[:_SEARCHED]),
        any(_bytes_of(tensor) in whole for tensor in truth.adapters[:_SEARCHED]),
    )
    return tuple(compress(_SECRETS, found))


def _bytes_of(values: Tensor) -> bytes:
    return values.contiguous().numpy().tobytes()
