"""Declares what a masking scheme promises and needs, and what it must implement. No code outside a scheme's own module
decides anything by its name (`tests/tenant/masking/test_registry.py`). A scheme may

* have its own options: `options_type`, a frozen dataclass that checks its values;
* open an answer in its own way before the check: its pads override `tenant.core.pads.Pad.open`;
* return the products of other rows than it was given, or keep hints on disk: `Pad.correction`, `headroom`, `prepare`;
* use no pads at all: `effects` then returns `UNMASKED_BY_CHOICE`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal

from symbiosis_priv.arithmetic.ring import NO_HEADROOM, Headroom
from symbiosis_priv.checkpoints.manifest import GroupFacts
from symbiosis_priv.checkpoints.weights import Progress, WeightStore
from symbiosis_priv.errors import ConfigError, RoleConflictError
from symbiosis_priv.federation import Federation, Peer
from symbiosis_priv.limits import DEFAULT_RING_BITS, GroupIndex, HintBits, RingBits
from symbiosis_priv.network.wire import Role
from tenant.connections.helper_client import HelperClient
from tenant.core.masked import UnmaskedByChoice
from tenant.core.pads import EffectSource, SessionSecret
from tenant.masking.backend import Backend
from tenant.preparation.opening import Opening
from tenant.preparation.prepared import Preparation

Observer = Literal["executor", "helper", "all but a helper", "executor+helper"]
"""One party that could read rows, or several parties that combine what they have seen. TLS excludes all others."""


@dataclass(frozen=True, kw_only=True)
class NoOptions:
    """The options of a scheme that has none."""


class Scheme(ABC):
    """One way to mask rows."""

    name: ClassVar[str]  # the value of `RemoteConfig(masking=...)`
    summary: ClassVar[str]  # the parties that can read rows, in a few words
    roles: ClassVar[frozenset[Role]]  # of the providers that it uses; none if it runs on the tenant alone
    own_weights: ClassVar[bool] = False  # the tenant needs the full checkpoint in every session
    hides_from: ClassVar[frozenset[Observer]]  # the parties that learn nothing about rows
    assumption: ClassVar[str]  # what `hides_from` rests on
    error: ClassVar[str | None] = None  # how results differ from the reference ("simulate"); None for the same bits
    verified: ClassVar[bool] = True  # a wrong answer is detected and not used
    stacks: ClassVar[bool] = True  # it masks rows for stacks of experts
    keeps_hints: ClassVar[bool] = False  # `prepare` of a `SessionScheme` makes hints (`tenant.preparation.hints`)
    options_type: ClassVar[type[Any]] = NoOptions  # a frozen dataclass, `RemoteConfig(masking_options={...})`

    def read_options(self, values: Mapping[str, object]) -> Any:
        """Check options by name, and return them as an `options_type`. Raises `ConfigError`."""
        known = [field.name for field in fields(self.options_type)]
        if unknown := sorted(values.keys() - set(known)):
            raise ConfigError(
                f"masking = {self.name!r} has no option {', '.join(map(repr, unknown))} (masking_options); "
                f"it has {', '.join(known) or 'none'}"
            )
        return self.options_type(**values)

    def check(self, federation: Federation, *, ring_bits: RingBits = DEFAULT_RING_BITS) -> None:
        """Check that the scheme keeps its promises with these providers, in a ring of `ring_bits` bits. Raises
        `RoleConflictError`: it needs a helper, and the file has none; `ConfigError`: it would show rows to executors
        that a registry names, or use their answers unverified."""
        if "helper" in self.roles and not federation.helpers:
            raise RoleConflictError(
                f"masking = {self.name!r} needs a [[provider]] with role = 'helper', run by another operator "
                f"than the executor; masking = 'local' needs none, nor does 'lwe' (experimental: a lattice "
                f"assumption, and 6 GB here for 7 billion weights; see `symbiosis-priv tenant check --masking lwe`)"
            )
        if federation.registries is not None and not ("executor" in self.hides_from and self.verified):
            raise ConfigError(
                f"masking = {self.name!r} trusts every executor, and [registry] in the federation file finds some that "
                f"you have not chosen: remove [registry], or choose masking = 'pad' or 'local'"
            )


class BackendScheme(Scheme):
    """A scheme without a session. It opens its own backend."""

    @abstractmethod
    def open(self, opening: Opening) -> Backend:
        """Open the scheme's backend for one model."""


Holders = Callable[[GroupIndex, Peer | None], Sequence[HelperClient]]


@dataclass(frozen=True, kw_only=True)
class Materials:
    """What a session passes to a scheme, all of one process. `secret`: the source of seeds and row numbers. `holders`:
    returns the helpers of the next pad of a layer group, by the executor that will see the rows, or None for any;
    raises if there are fewer than a pad needs. `store`: the tenant's own copy of the weights, if it has one."""

    preparation: Preparation
    secret: SessionSecret
    holders: Holders
    store: WeightStore | None

    @property
    def facts(self) -> Sequence[GroupFacts]:
        return self.preparation.facts


class SessionScheme(Scheme):
    """A scheme for the ring: executors multiply, and a session masks, verifies and unmasks."""

    def prepare(
        self,
        preparation: Preparation,
        store: WeightStore,
        *,
        bits: HintBits,
        training: bool,
        progress: Progress | None = None,
    ) -> int:
        """Make what the scheme keeps on disk beside the verification keys, in precision `bits`. Returns its bytes.
        `store`: the full checkpoint. `training`: also prepare for backward products."""
        return 0

    def headroom(self, preparation: Preparation) -> Headroom:
        """Return what the scheme adds itself to rows and products. Raises `CheckpointError` if `prepare` is missing."""
        return NO_HEADROOM

    def facts(self, preparation: Preparation, ring_bits: RingBits = DEFAULT_RING_BITS) -> list[GroupFacts]:
        """Return the facts of all layer groups, with bounds that leave the scheme its room."""
        headroom = self.headroom(preparation)
        return [facts.narrowed(ring_bits, headroom) for facts in preparation.facts]

    @abstractmethod
    def effects(self, materials: Materials) -> EffectSource | UnmaskedByChoice:
        """Return the source of pads. A scheme without pads returns `UNMASKED_BY_CHOICE`."""
