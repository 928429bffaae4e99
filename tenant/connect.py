"""From a `RemoteConfig` to a working `Backend`."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import Progress as Bar

from symbiosis_priv.checkpoint import resolve
from symbiosis_priv.errors import CheckpointError
from symbiosis_priv.federation import load_federation
from symbiosis_priv.limits import DEFAULT_WEIGHT_BITS
from symbiosis_priv.weights import Progress, WeightStore
from tenant.backend import Backend, RingBackend, RingProduct, Simulation
from tenant.config import RemoteConfig
from tenant.facts import GroupFacts, prepare
from tenant.paper_pool import PaperPoolBackend
from tenant.session import Session, SessionOptions


def open_backend(config: RemoteConfig, model: str | Path) -> Backend:
    """Open what `config` asks for.

    Args:
        config: masking, federation and options.
        model: the checkpoint being loaded; read for keys unless `config.checkpoint` names another.
    """
    cache = None if config.cache is None else Path(config.cache)
    if config.masking == "simulate":
        bits = DEFAULT_WEIGHT_BITS if config.weight_bits is None else config.weight_bits
        store = WeightStore(resolve(config.checkpoint or model), weight_bits=bits, cache=cache)
        with progress_bar("quantising") as progress:
            manifest = store.manifest(progress=progress)
        facts = [GroupFacts.of(entry, store.group(i)) for i, entry in enumerate(manifest.groups)]
        return RingBackend(facts, Simulation(store))
    assert config.federation is not None  # RemoteConfig checks it
    federation = load_federation(config.federation)
    local = _local_store(config, model, weight_bits=federation.weight_bits, cache=cache)
    with progress_bar("verification keys") as progress:
        preparation = prepare(
            local, digest=federation.model_digest, columns=config.verify_columns, cache=cache, progress=progress
        )
    if config.masking == "paper-pool":
        return PaperPoolBackend(
            federation,
            preparation,
            pool_size=config.paper_pool_size,
            noise_scale=config.paper_noise_scale,
            deadline_s=config.deadline_s,
            wiretap=config.wiretap,
        )
    if config.masking == "local" and (local is None or local.manifest().digest != federation.model_digest):
        raise CheckpointError(
            "masking = 'local' multiplies on the tenant: pass RemoteConfig(checkpoint='FULL_CHECKPOINT')"
        )
    options = SessionOptions(
        masking=config.masking,
        deadline_s=config.deadline_s,
        pool_memory=config.pool_memory_mib << 20,
        row_bucket=config.row_bucket,
        wiretap=config.wiretap,
    )
    backend = RingBackend(preparation.facts, Session(federation, preparation, options=options, store=local))
    weakref.finalize(backend, _close, backend.products, process=os.getpid()).atexit = False
    return backend


def _close(products: RingProduct, *, process: int) -> None:
    """Close the session of a model that is gone, for those who do not call `backend_of(model).close()`."""
    if os.getpid() == process:  # a fork's copy closes nothing of its parent's
        # on a thread of its own: collection can happen on one that closing would wait for
        threading.Thread(target=products.close, name="close", daemon=True).start()


def _local_store(
    config: RemoteConfig, model: str | Path, *, weight_bits: int, cache: Path | None
) -> WeightStore | None:
    """The full checkpoint, if the tenant has it."""
    store = WeightStore(resolve(config.checkpoint or model), weight_bits=weight_bits, cache=cache)
    return store if config.checkpoint or store.is_complete() else None


@contextmanager
def progress_bar(label: str) -> Iterator[Progress]:
    """A bar that appears with the first report, on a terminal only."""
    console = Console(stderr=True)
    with Bar(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(label, visible=False)
        yield lambda done, total: bar.update(task, completed=done, total=total, visible=True)
