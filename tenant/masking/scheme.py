"""What a masking scheme says about itself, and what it does. `RemoteConfig`, the session, the threat model and the
README's table ask here, so that no scheme's name is known anywhere but in its own module."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from symbiosis_priv.checkpoints.weights import WeightStore
from symbiosis_priv.errors import ConfigError, RoleConflictError
from symbiosis_priv.federation import Federation, Peer
from symbiosis_priv.network.wire import Role
from tenant.connections.helper import Helper
from tenant.core.facts import GroupFacts
from tenant.core.masked import UnmaskedByChoice
from tenant.core.pads import EffectSource
from tenant.core.secret import SessionSecret
from tenant.masking.backend import Backend
from tenant.preparation.opening import Opening

Observer = Literal["executor", "helper", "all but a helper", "executor+helper"]
"""Who could read rows: one party, or several that pool what they have seen. Outsiders never can: TLS."""


class Scheme(ABC):
    """One way to mask rows. A subclass's docstring says whom it hides rows from, and under which assumption.

    Attributes:
        name: what `RemoteConfig(masking=...)` calls it.
        summary: who can read rows, in a few words.
        roles: the providers it talks to; none if it runs on the tenant alone, and then it needs no federation.
        own_weights: whether the tenant needs the full checkpoint at hand, and not once for its verification keys.
        hides_from: who learns nothing about rows.
        assumption: what that rests on.
        error: how far results are from the reference ("simulate"); None if they are the same bits.
        verified: whether a wrong answer raises an error instead of being used.
        headroom_bits: how much of the range ±2^31 it takes for itself; rows are scaled to the rest.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    roles: ClassVar[frozenset[Role]]
    own_weights: ClassVar[bool] = False
    hides_from: ClassVar[frozenset[Observer]]
    assumption: ClassVar[str]
    error: ClassVar[str | None] = None
    verified: ClassVar[bool] = True
    headroom_bits: ClassVar[int] = 0

    @property
    def exact(self) -> bool:
        """Whether results are the reference's, bit for bit."""
        return self.error is None

    def check(self, federation: Federation) -> None:
        """Whether it keeps what it promises with these providers.

        Raises:
            RoleConflictError: it needs a helper, and there is none.
            ConfigError: a registry may bring executors that it would show rows to, or whose answers it would believe.
        """
        if "helper" in self.roles and not federation.helpers:
            raise RoleConflictError(
                f"masking = {self.name!r} needs a [[provider]] with role = 'helper', run by another operator "
                f"than the executor; masking = 'local' needs none"
            )
        if federation.registries is not None and not ("executor" in self.hides_from and self.verified):
            raise ConfigError(
                f"masking = {self.name!r} trusts every executor, and [registry] in the federation file finds some that "
                f"you have not chosen: remove [registry], or choose masking = 'pad' or 'local'"
            )


class BackendScheme(Scheme):
    """A scheme that goes a way of its own."""

    @abstractmethod
    def open(self, opening: Opening) -> Backend:
        """Make it work for one model.

        Args:
            opening: the user's options, and on request the federation, the model's facts and the tenant's weights.
        """


Holders = Callable[[int, Peer | None], Sequence[Helper]]


@dataclass(frozen=True, kw_only=True)
class Materials:
    """What a session offers a scheme for its effects. All of it belongs to one process.

    Args:
        facts: of every layer group.
        secret: the source of seeds and row numbers.
        holders: which helpers share the next pad of a layer group, for an executor or for any. Never fewer than a pad
            has; none unless the scheme's `roles` name them.
        store: the tenant's own copy of the weights, if it has one.
    """

    facts: Sequence[GroupFacts]
    secret: SessionSecret
    holders: Holders
    store: WeightStore | None


class SessionScheme(Scheme):
    """A scheme for the ring: executors multiply, a session masks, verifies and unmasks."""

    @abstractmethod
    def effects(self, materials: Materials) -> EffectSource | UnmaskedByChoice:
        """Where pads come from. A scheme without pads says so by name: it returns `UNMASKED_BY_CHOICE`."""
