"""Chooses the layers of an executor with `layers = "auto"`, at its start and while it runs (docs/federation.md).

The rule is that of PETALS (Borzunov et al., 2023): of all contiguous ranges of the provider's length, take that whose
least served layer is served least; then compare the second least served layer, and so on. If ranges are equal in all
layers, the first one is taken, so providers with the same descriptors decide alike. Every executor counts once, and
layers with fewer operators come first. A dishonest registry can cause a bad choice, and nothing else.

Every move of a running executor increases the sorted list of what layers have, so moves end. Executors that decide at
the same time do not see each other's moves: those of one operator take turns, and of all executors an eighth may move
in a period for their number alone.
"""

import statistics
import time
import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import Final, NamedTuple, Self

import msgspec

from provider import logs
from provider.announce.announcer import trust_of
from provider.config.memory_plan import check_plan, memory_plan
from provider.config.schema import AUTO, ProviderConfig
from provider.products.model import open_store
from symbiosis_priv.certificates.reading import key_fingerprint, load_certificates, operator_of
from symbiosis_priv.checkpoints.layers import LayerRange
from symbiosis_priv.checkpoints.weights import Progress
from symbiosis_priv.errors import ConfigError, StorageError, SymbiosisError
from symbiosis_priv.federation.parties import plain
from symbiosis_priv.registry.descriptor import VerifiedDescriptor, newest_of
from symbiosis_priv.registry.protocol import RegistryClient
from symbiosis_priv.system.pacing import Periodic

log = logs.EventLog(__name__)

_DEADLINE_S: Final = 10.0
_FIRST_LAYER: Final = "0"
_ENOUGH_OPERATORS: Final = 2
_WORTH_MOVING: Final = 0.75  # share of the mean number of executors; PETALS' threshold
_TURNS: Final = 8
_JITTER: Final = 0.3  # random share of a period


class Placed(NamedTuple):
    """An executor as others see it; `key` is the fingerprint of its certificate's key."""

    key: str
    operator: str
    layers: LayerRange

    @classmethod
    def of(cls, announced: VerifiedDescriptor) -> Self:
        return cls(announced.key, plain(announced.operator), announced.descriptor.layers)


class Served(NamedTuple):
    """The number of operators that serve a layer, at most 2, and the number of their executors."""

    operators: int = 0
    executors: int = 0


def coverage(layers: int, placed: Sequence[Placed]) -> list[Served]:
    """The numbers of operators and executors that serve each layer of a model."""
    operators: list[list[str]] = [[] for _ in range(layers)]  # of each executor
    for one in placed:
        for layer in range(one.layers.first, min(one.layers.last + 1, layers)):
            operators[layer].append(one.operator)
    return [Served(min(len(set(names)), _ENOUGH_OPERATORS), len(names)) for names in operators]


def most_needed(served: Sequence[Served], length: int) -> LayerRange:
    """The contiguous range of `length` layers that is served least; all layers if the model has fewer."""
    length = min(length, len(served))
    starts = range(len(served) - length + 1)
    first = min(starts, key=lambda start: sorted(served[start : start + length]))
    return LayerRange(first, first + length - 1)


def better(layers: int, own: Placed, others: Sequence[Placed], *, period: int) -> LayerRange | None:
    """The range to which a running executor should move in this period; None if it should stay. `layers` is the number
    of layers of the model, and `others` are the other executors that stay."""
    now = sorted(coverage(layers, [*others, own]))
    urgent = now[0].operators < _ENOUGH_OPERATORS
    unbalanced = now[0].executors < _WORTH_MOVING * statistics.fmean(one.executors for one in now)
    if not (urgent or unbalanced) or not has_turn(own, others, period=period, turns=1 if urgent else _TURNS):
        return None
    alone = coverage(layers, others)
    if min(alone[own.layers.first : own.layers.last + 1]).operators == 0:
        return None
    best = most_needed(alone, own.layers.last - own.layers.first + 1)
    then = sorted(coverage(layers, [*others, own._replace(layers=best)]))
    return best if then[0].operators > now[0].operators or (unbalanced and then > now) else None


def has_turn(own: Placed, others: Iterable[Placed], *, period: int, turns: int) -> bool:
    """Returns True if `own` may move in the period of this number: of one operator's executors at most one, and each
    once in `turns` periods at most."""
    keys = sorted({own.key, *(one.key for one in others if one.operator == own.operator)})
    turns = max(turns, len(keys))
    first = zlib.crc32(own.operator.encode())
    return (first + keys.index(own.key) - period) % turns == 0


class Placement:
    """What the registries list for one executor's model, whose configuration says `layers = "auto"`. Raises
    `CertificateError`: the authority's or the provider's certificate cannot be used; `CheckpointError`,
    `UnsupportedModelError`: the model cannot be read or served."""

    def __init__(self, config: ProviderConfig, *, progress: Progress | None = None) -> None:
        self._config = config
        # the digest covers all layers, and only the chosen ones are packed later
        self._manifest = open_store(unplaced(config)).manifest(progress=progress)
        self.layers = self._manifest.layers[-1] + 1  # number of layers of the model

    def others(self) -> list[Placed]:
        """The other executors of the model that stay. Raises `ConfigError`: no registry can be reached."""
        registry, trust = self._config.registry, trust_of(self._config.registry)
        own = key_fingerprint(load_certificates(self._config.tls.certificate)[0])
        listed: list[bytes] = []
        failures = []
        for address in registry.announce:
            try:
                with RegistryClient(address, trust, deadline_s=_DEADLINE_S) as client:
                    listed += client.list(self._manifest.digest)
            except SymbiosisError as error:
                failures.append(str(error))
        if len(failures) == len(registry.announce):
            raise ConfigError(
                f'layers = "auto" needs a registry, and none can be reached ({failures[0]}): start one, or name the '
                f"layers"
            )
        found, refused = newest_of(listed, trust, now=time.time())
        for reason, count in refused.items():
            log.info("not_believed", reason=reason, descriptors=count)
        return [
            Placed.of(one)
            for one in found
            if one.descriptor.model_digest == self._manifest.digest and one.key != own and not one.descriptor.draining
        ]

    def own(self, layers: LayerRange) -> Placed:
        certificate = load_certificates(self._config.tls.certificate)[0]
        operator = plain(operator_of(certificate) or "")
        return Placed(key_fingerprint(certificate), operator, layers)


class Rebalancer:
    """Asks once in a period whether other layers than the present ones would help the federation more. The
    configuration is as read, with `layers = "auto"`. `move` is called with that of the new layers, whose weights are
    packed, and stops the rebalancer."""

    def __init__(self, config: ProviderConfig, *, layers: LayerRange, move: Callable[[ProviderConfig], None]) -> None:
        self._config, self._layers, self._move = config, layers, move
        self._placement = Placement(config)
        every_s = config.registry.rebalance_s
        self.periodic = Periodic(self._look, every_s=every_s, name="rebalancing", jitter=_JITTER)

    def _look(self) -> None:
        period = int(time.time() // self._config.registry.rebalance_s)
        if (best := self._better(period)) is None:
            return
        config = with_layers(self._config, best)
        log.info("preparing_to_move", layers=str(self._layers), to=str(best))
        store = open_store(config)
        try:
            check_plan(memory_plan(config, store.manifest(), store.served))
            for group in store.served:
                store.matrix(group)  # packs and caches it
            if store.cache_failed:
                raise StorageError(f"the new weights do not fit in {store.cache}: make room there")
        except (ConfigError, StorageError) as error:
            log.warning("cannot_move", to=str(best), reason=str(error))
            return
        if self._better(period) == best:  # what others have announced meanwhile counts
            self._move(config)

    def _better(self, period: int) -> LayerRange | None:
        try:
            others = self._placement.others()
        except ConfigError:
            return None  # no registry answers: it stays where it is
        return better(self._placement.layers, self._placement.own(self._layers), others, period=period)


def placed(config: ProviderConfig, *, progress: Progress | None = None) -> ProviderConfig:
    """Returns the configuration with chosen layers in place of `layers = "auto"`; otherwise the same configuration.
    Raises `ConfigError`: no registry can be reached; `CertificateError`, `CheckpointError`, `UnsupportedModelError`:
    see `Placement`."""
    if config.model.layers != AUTO:
        return config
    placement = Placement(config, progress=progress)
    served = coverage(placement.layers, placement.others())
    length = config.registry.capacity_layers
    assert length is not None, "the configuration requires it"
    chosen = most_needed(served, length)
    least = min(served[chosen.first : chosen.last + 1])
    log.info("placed", layers=str(chosen), operators_there=least.operators, executors_there=least.executors)
    return with_layers(config, chosen)


def unplaced(config: ProviderConfig) -> ProviderConfig:
    """Returns the configuration without `layers = "auto"`, to compute the model's digest, which covers all layers."""
    return with_layers(config, _FIRST_LAYER) if config.model.layers == AUTO else config


def with_layers(config: ProviderConfig, layers: LayerRange | str) -> ProviderConfig:
    return msgspec.structs.replace(config, model=msgspec.structs.replace(config.model, layers=str(layers)))
