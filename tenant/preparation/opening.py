"""Reads what a masking scheme needs from the user's options: federation, verification keys and the tenant's weights."""

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

from symbiosis_priv.checkpoints.checkpoint import resolve
from symbiosis_priv.checkpoints.layers import Scope
from symbiosis_priv.checkpoints.manifest import GroupFacts
from symbiosis_priv.checkpoints.weights import WeightStore
from symbiosis_priv.display import terminal
from symbiosis_priv.errors import CheckpointError
from symbiosis_priv.federation import Federation, load_federation
from symbiosis_priv.limits import DEFAULT_RING_BITS, DEFAULT_WEIGHT_BITS, RingBits
from tenant.options import Options
from tenant.preparation.keys import prepare
from tenant.preparation.own_tensors import own_digest
from tenant.preparation.prepared import Preparation


class Opening:
    """The federation, preparation and checkpoints of a masking scheme, each read on first access."""

    def __init__(self, options: Options, model: str | Path) -> None:
        self.options = options
        self._model = model
        self._cache = None if options.cache is None else Path(options.cache)

    @cached_property
    def federation(self) -> Federation:
        assert self.options.federation is not None  # RemoteConfig checks it
        return load_federation(self.options.federation)

    @cached_property
    def preparation(self) -> Preparation:
        """Facts and verification keys of the pinned model."""
        with terminal.progress_bar("verification keys") as progress:
            return prepare(
                self.full_store,
                digest=self.federation.model_digest,
                model=self._own_store(self.federation.weight_bits, self.federation.scope),
                weight_bits=self.federation.weight_bits,
                cache=self._cache,
                progress=progress,
            )

    @cached_property
    def ring_bits(self) -> RingBits:
        """The user's option, else that of the federation file, else the default."""
        if self.options.ring_bits is not None:
            return self.options.ring_bits
        return DEFAULT_RING_BITS if self.options.federation is None else self.federation.ring_bits

    def quantised(self) -> tuple[WeightStore, Sequence[GroupFacts]]:
        """Quantise the full checkpoint for a scheme without providers. Returns the weights and their facts. Raises
        `CheckpointError` if the tenant's tensors in the loaded checkpoint differ from those in the full checkpoint."""
        bits = DEFAULT_WEIGHT_BITS if self.options.weight_bits is None else self.options.weight_bits
        scope = Scope(tied_head=self.options.tied_head, round_trips=self.options.round_trips or 4)
        store = self._store(bits, scope)
        with terminal.progress_bar("quantising") as progress:
            manifest = store.manifest(progress=progress)
        own = self._own_store(bits, scope)
        if own.path != store.path and own_digest(own, manifest) != own_digest(store, manifest):
            raise CheckpointError(
                f"config.json or the tensors that stay with you (embeddings, norms) of {own.path} are not those of "
                f"{store.path}; load {store.path} or its slim copy"
            )
        return store, [GroupFacts.of(entry, store.group(i)) for i, entry in enumerate(manifest.groups)]

    @cached_property
    def full_store(self) -> WeightStore | None:
        """The full checkpoint; None if the tenant has only a slim one."""
        store = self._store(self.federation.weight_bits, self.federation.scope)
        return store if self.options.checkpoint or store.is_complete() else None

    def _own_store(self, weight_bits: int, scope: Scope) -> WeightStore:  # that is being loaded, full or slim
        return WeightStore(resolve(self._model), weight_bits=weight_bits, scope=scope, cache=self._cache)

    def _store(self, weight_bits: int, scope: Scope) -> WeightStore:
        path = resolve(self.options.checkpoint or self._model)
        return WeightStore(path, weight_bits=weight_bits, scope=scope, cache=self._cache)
