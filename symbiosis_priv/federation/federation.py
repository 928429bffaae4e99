"""A tenant's federation, and rule 8 in it: who may be asked for rows under whose pads.

Rule 8: whoever knows a pad's seed never sees a row masked with it, and what one of a company's providers knows, all of
them know. Without `[pads]` every helper shares every pad, so a company that has both roles is refused. With
`helpers = k` the tenant takes for each executor k helpers of k companies other than its own; refused is what leaves no
such choice.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from symbiosis_priv.checkpoints.layers import LayerRange
from symbiosis_priv.errors import ConfigError, RoleConflictError
from symbiosis_priv.federation.parties import Parties
from symbiosis_priv.federation.peers import Company, Peer, Registries
from symbiosis_priv.federation.spelling import is_this_machine
from symbiosis_priv.network.addresses import parse_address


@dataclass(frozen=True)
class Federation:
    """A parsed and checked `federation.toml`.

    Args:
        companies: who counts as one party although the operators' names differ.
        pad_helpers: how many helpers share each pad, the others being spares. None: all share every pad.
        registries: where more executors are found; None: there are those of the file and no others.
    """

    model_digest: str
    weight_bits: int
    tenant_certificate: Path
    tenant_key: Path
    peers: tuple[Peer, ...]
    companies: tuple[Company, ...] = ()
    pad_helpers: int | None = None
    registries: Registries | None = None

    @property
    def executors(self) -> tuple[Peer, ...]:
        """Providers that see masked rows, as far as the file lists them."""
        return tuple(p for p in self.peers if p.role == "executor")

    @property
    def helpers(self) -> tuple[Peer, ...]:
        """Providers that see a seed and never a row."""
        return tuple(p for p in self.peers if p.role == "helper")

    @property
    def local(self) -> bool:
        """True if every provider and every registry of the file is on this machine."""
        hosts = [peer.host for peer in self.peers]
        if self.registries is not None:
            hosts += [parse_address(address)[0] for address in self.registries.addresses]
        return all(is_this_machine(host) for host in hosts)

    def one_company(self, one: Peer, other: Peer) -> bool:
        """Whether what one of them knows, the other may know. Also for peers that are not in the file.

        They have an operator or a name in common, or a chain of companies and operators leads from one to the other.
        """
        return self._parties.same(one, other)

    def admissible(self, executor: Peer, holders: Collection[Peer]) -> bool:
        """Rule 8: whether rows may go to an executor under pads whose seeds are known to these helpers, by company."""
        return not any(self.one_company(executor, holder) for holder in holders)

    def companies_of(self, peers: Collection[Peer]) -> int:
        """How many companies these peers are: so many that none of them knows what another one does."""
        parties = Parties([*self.peers, *peers], self.companies)
        return len({parties.roots(peer) for peer in peers})

    @cached_property
    def _parties(self) -> Parties:
        return Parties(self.peers, self.companies)


def check_choice(federation: Federation) -> None:
    """With `[pads]`: for every executor, and every layer as far as the file says, enough helpers of other companies."""
    k = federation.pad_helpers
    if k is None:
        return
    helpers = federation.helpers
    if k > len(helpers):
        raise ConfigError(
            f"[pads] helpers = {k}, and {len(helpers)} [[provider]] have role = 'helper': add helpers, or lower it"
        )
    if not federation.executors and (companies := federation.companies_of(helpers)) < k:  # a registry finds them
        raise RoleConflictError(
            f"[pads] helpers = {k} takes {k} of different companies for each pad, and those of this file are of "
            f"{companies}: add helpers that others run, or lower it"
        )
    for executor in federation.executors:
        others = [helper for helper in helpers if federation.admissible(executor, [helper])]
        layers = _turning_points(executor.layers, helpers)
        found = {layer: federation.companies_of([h for h in others if _may_serve(h, layer)]) for layer in layers}
        short = {layer: there for layer, there in found.items() if there < k}
        # Of an executor that does not say what it serves, some layer with a choice is all that can be asked for.
        if short and (executor.layers is not None or len(short) == len(found)):
            layer, there = next(iter(short.items()))
            where = f" at layer {layer}" if any(helper.layers for helper in helpers) else ""
            raise RoleConflictError(
                f"executor {executor.name!r} has helpers of {there} companies other than its own{where}, and [pads] "
                f"helpers = {k} takes {k} of different companies for each pad: add helpers that others run, or lower it"
            )


def _turning_points(layers: LayerRange | None, helpers: Sequence[Peer]) -> list[int]:
    """The layers of a range where the set of helpers that serve may change, its first one included."""
    bounds = {bound for h in helpers if h.layers for bound in (h.layers.first, h.layers.last + 1)}
    if layers is None:
        return sorted({0} | bounds)
    return sorted({layers.first} | {bound for bound in bounds if bound in layers})


def _may_serve(peer: Peer, layer: int) -> bool:
    return peer.layers is None or layer in peer.layers
