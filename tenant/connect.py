"""From a `RemoteConfig` to a working `Backend`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path

from rich.console import Console
from rich.progress import Progress as Bar

from symbiosis_priv.checkpoint import resolve
from symbiosis_priv.errors import CheckpointError
from symbiosis_priv.federation import Federation, load_federation
from symbiosis_priv.limits import DEFAULT_WEIGHT_BITS
from symbiosis_priv.weights import Progress, WeightStore
from tenant.backend import Backend, RingBackend
from tenant.config import RemoteConfig
from tenant.facts import GroupFacts, Preparation
from tenant.masking.registry import scheme_named
from tenant.masking.scheme import SessionScheme
from tenant.own_tensors import own_digest
from tenant.preparation import prepare
from tenant.routing.discovery import require_hidden_rows
from tenant.session.options import SessionOptions
from tenant.session.published import publish
from tenant.session.session import Session


def open_backend(config: RemoteConfig, model: str | Path) -> Backend:
    """Open what `config` asks for.

    Args:
        config: masking, federation and options.
        model: the checkpoint being loaded; read for keys unless `config.checkpoint` names another.
    """
    return scheme_named(config.masking).open(Opening(config, model))


class Opening:
    """What a scheme may ask for while it opens; each is read when it is first asked for.

    Args:
        config: the user's options.
        model: the checkpoint being loaded.
    """

    def __init__(self, config: RemoteConfig, model: str | Path) -> None:
        self.config = config
        self._model = model
        self._cache = None if config.cache is None else Path(config.cache)

    @cached_property
    def federation(self) -> Federation:
        """Whom to talk to."""
        assert self.config.federation is not None  # RemoteConfig checks it
        federation = load_federation(self.config.federation)
        require_hidden_rows(scheme_named(self.config.masking), federation)
        return federation

    @cached_property
    def preparation(self) -> Preparation:
        """Facts and verification keys of the pinned model."""
        with progress_bar("verification keys") as progress:
            return prepare(
                self._full_store,
                digest=self.federation.model_digest,
                columns=self.config.verify_columns,
                model=self._own_store(self.federation.weight_bits),
                weight_bits=self.federation.weight_bits,
                cache=self._cache,
                progress=progress,
            )

    def quantised(self) -> tuple[WeightStore, Sequence[GroupFacts]]:
        """The tenant's own weights, and their facts, for a scheme without providers."""
        bits = DEFAULT_WEIGHT_BITS if self.config.weight_bits is None else self.config.weight_bits
        store = self._store(bits)
        with progress_bar("quantising") as progress:
            manifest = store.manifest(progress=progress)
        own = self._own_store(bits)
        if own.path != store.path and own_digest(own, manifest) != own_digest(store, manifest):
            raise CheckpointError(
                f"config.json or the tensors that stay with you (embeddings, norms) of {own.path} are not those of "
                f"{store.path}; load one model, or its slim copy"
            )
        return store, [GroupFacts.of(entry, store.group(i)) for i, entry in enumerate(manifest.groups)]

    def session(self, scheme: SessionScheme) -> Backend:
        """A session with the federation that masks by `scheme`.

        Raises:
            CheckpointError: the scheme multiplies on the tenant, which has not got the weights.
        """
        config, preparation, store = self.config, self.preparation, self._full_store
        if scheme.own_weights and (store is None or store.manifest().digest != self.federation.model_digest):
            raise CheckpointError(
                f"masking = {scheme.name!r} multiplies on the tenant: "
                f"pass {config.option('checkpoint', 'FULL_CHECKPOINT')}"
            )
        options = SessionOptions(
            masking=scheme.name,
            deadline_s=config.deadline_s,
            deadline_option=config.option("deadline_s"),
            pool_memory=config.pool_memory_mib << 20,
            row_bucket=config.row_bucket,
            wiretap=config.wiretap,
        )
        session = Session(self.federation, preparation, options=options, store=store)
        if config.status is not None:
            publish(session, Path(config.status))
        return RingBackend([facts.with_headroom(scheme.headroom_bits) for facts in preparation.facts], session)

    @cached_property
    def _full_store(self) -> WeightStore | None:
        """The full checkpoint, if the tenant has it."""
        store = self._store(self.federation.weight_bits)
        return store if self.config.checkpoint or store.is_complete() else None

    def _own_store(self, weight_bits: int) -> WeightStore:
        """The checkpoint that is being loaded, full or not."""
        return WeightStore(resolve(self._model), weight_bits=weight_bits, cache=self._cache)

    def _store(self, weight_bits: int) -> WeightStore:
        return WeightStore(resolve(self.config.checkpoint or self._model), weight_bits=weight_bits, cache=self._cache)


@contextmanager
def progress_bar(label: str) -> Iterator[Progress]:
    """A bar that appears with the first report, on a terminal only."""
    console = Console(stderr=True)
    with Bar(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(label, visible=False)
        yield lambda done, total: bar.update(task, completed=done, total=total, visible=True)
