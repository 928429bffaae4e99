"""One row's way: the files, the changes of file and the calls of one product, at the tenant and at the provider.

`python -m tests.sizes --way` prints them. A real session with `pad` asks two providers of this process over TLS. A row
is multiplied many times, as a decoded token's; the smallest figures count, because a pool is refilled or a queue is
used now and then. The tenant's figures are those of the thread that waits for the product, from float rows to float
rows. The provider's are those of the executor's thread with the most calls, from the request to the next one.
"""

import itertools
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = str(Path(__file__).parents[1]) + "/"
PRODUCT = tuple(ROOT + package for package in ("symbiosis_priv/", "provider/", "tenant/"))
_PRODUCTS = 40
_QUIET_S = 0.05  # by then, the provider waits for the next request


@dataclass(frozen=True)
class Way:
    """What one thread does for one row.

    Args:
        files: the project's files whose functions are called, in the order of the first call.
        changes: how often a call leads to another of these files than the call before.
        own: calls of the project's functions. other: calls of other functions, in Python or C.
    """

    files: tuple[str, ...]
    changes: int
    own: int
    other: int

    @classmethod
    def of(cls, calls: list[str]) -> "Way":
        """The way of a list of calls: the file of each called function, "" for functions of other code."""
        own = [file for file in calls if file]
        changes = sum(before != after for before, after in itertools.pairwise(own))
        return cls(tuple(dict.fromkeys(own)), changes, len(own), len(calls) - len(own))


def ways() -> tuple[Way, Way]:
    """Measure a row's way at the tenant and at the provider."""
    with tempfile.TemporaryDirectory() as folder:
        return _measure(Path(folder))


def _measure(folder: Path) -> tuple[Way, Way]:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from provider.serve import Provider
    from symbiosis_priv.arithmetic.ring import FORWARD
    from symbiosis_priv.certificates import issuing
    from symbiosis_priv.certificates.reading import Kind
    from symbiosis_priv.checkpoints.weights import WeightStore
    from symbiosis_priv.federation import Federation, Peer
    from symbiosis_priv.limits import Role
    from tenant.masking.backend import RingBackend
    from tenant.options import SessionOptions
    from tenant.preparation.keys import prepare
    from tenant.session.session import Session
    from tests.provider.clients import config_of

    sizes: dict[str, Any] = {"vocab_size": 97, "hidden_size": 64, "intermediate_size": 112, "num_hidden_layers": 2}
    model = folder / "model"
    LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)).save_pretrained(model)
    authority = issuing.create_authority(folder)
    tenant = issuing.issue(folder, authority=authority, kind=Kind.TENANT, name="tenant")
    recording, calls = threading.Event(), dict[int, list[str]]()

    def profile(frame: FrameType, event: str, _: object) -> None:
        if recording.is_set() and event in ("call", "c_call"):
            path = frame.f_code.co_filename if event == "call" else ""
            own = path.removeprefix(ROOT) if path.startswith(PRODUCT) else ""
            calls.setdefault(threading.get_ident(), []).append(own)

    def started(role: Role) -> Provider:
        own = issuing.issue(folder, authority=None, kind=Kind.PROVIDER, name=role)
        options: dict[str, Any] = {"name": role, "roles": (role,), "log_level": "warning"}
        return Provider(config_of(model, cache=folder, own=own, authority=authority, **options)).start()

    def peer(role: Role, provider: Provider) -> Peer:
        host, _, port = provider.address.rpartition(":")
        return Peer(role, f"company of {role}", role, host, int(port), folder / f"{role}.pem")

    threading.setprofile(profile)  # in all threads that start from now on
    executor, helper = started("executor"), started("helper")
    store = WeightStore(model, cache=folder)
    digest = store.manifest().digest
    session = Session(
        Federation(
            model_digest=digest,
            weight_bits=store.weight_bits,
            tenant_certificate=tenant.certificate,
            tenant_key=tenant.key,
            peers=(peer("executor", executor), peer("helper", helper)),
        ),
        prepare(store, digest=digest, cache=folder),
        options=SessionOptions(),
    )
    own, theirs = list[Way](), list[Way]()
    try:
        with RingBackend(session.preparation.facts, session) as backend, torch.inference_mode():
            x, me = torch.randn(1, 64), threading.get_ident()
            y = torch.empty(1, backend.facts[1].outputs(FORWARD))
            for number in range(_PRODUCTS):
                calls.clear()
                if number:
                    recording.set()
                sys.setprofile(profile)
                try:
                    if backend.forward_few(1, x, torch.float32) is None:
                        backend.multiply(1, FORWARD, [x], [y])
                finally:
                    sys.setprofile(None)
                time.sleep(_QUIET_S)
                recording.clear()
                if number:
                    own.append(Way.of(calls.pop(me)[:-1]))  # without the call that ends the recording
                    threads = map(Way.of, list(calls.values()))
                    at_provider = [way for way in threads if any(file.startswith("provider/") for file in way.files)]
                    theirs.append(max(at_provider, key=lambda way: way.own))
    finally:
        threading.setprofile(None)
        executor.stop()
        helper.stop()

    fewest = partial(min, key=lambda way: way.own + way.other)
    return fewest(own), fewest(theirs)
