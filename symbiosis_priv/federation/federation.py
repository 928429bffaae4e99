"""A tenant's federation, and rule 8: which executor may receive rows under which pads.

Rule 8: a company that knows a pad's seed never sees a row masked with that pad. All providers of one company may know
what each of them knows. Without `[pads]`, all helpers share every pad, so a company with both roles is refused. With
`helpers = k`, the tenant chooses for each executor k helpers of k different companies, none of them the executor's. A
file that leaves no such choice is refused.
"""

import ssl
from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from symbiosis_priv.checkpoints.layers import DEFAULT_SCOPE, LayerRange, Scope
from symbiosis_priv.errors import ConfigError, RoleConflictError
from symbiosis_priv.federation.parties import Company, Parties, Peer, Registries, is_this_machine
from symbiosis_priv.limits import DEFAULT_RING_BITS, RingBits
from symbiosis_priv.network.addresses import parse_address
from symbiosis_priv.network.tls import client_context


@dataclass(frozen=True)
class Federation:
    """A parsed and checked `federation.toml`.

    Args:
        companies: providers and operators that count as one party although their operators' names differ.
        pad_helpers: number of helpers that share each pad; the other helpers are spares. None: all share every pad.
        relay: helpers send effects to the executor, if both allow it.
        ring_bits: bits of the integers on the wire.
        registries: registries that list more executors; None: the tenant uses the executors of the file only.
        scope: the optional layer groups that the providers serve.
    """

    model_digest: str
    weight_bits: int
    tenant_certificate: Path
    tenant_key: Path
    peers: tuple[Peer, ...]
    companies: tuple[Company, ...] = ()
    pad_helpers: int | None = None
    relay: bool = False
    registries: Registries | None = None
    scope: Scope = DEFAULT_SCOPE
    ring_bits: RingBits = DEFAULT_RING_BITS

    @property
    def executors(self) -> tuple[Peer, ...]:
        """The executors of the file. Executors that a registry lists are not included."""
        return tuple(p for p in self.peers if p.role == "executor")

    @property
    def helpers(self) -> tuple[Peer, ...]:
        """The helpers of the file: a helper sees seeds and never a row."""
        return tuple(p for p in self.peers if p.role == "helper")

    def tls_context(self, peer: Peer) -> ssl.SSLContext:
        """The tenant's context for connections to a provider. Raises `CertificateError`; see `tls.client_context`."""
        return client_context(certificate=self.tenant_certificate, key=self.tenant_key, pins=peer.pins)

    @property
    def local(self) -> bool:
        """True if every provider and every registry of the file is on this machine."""
        hosts = [peer.host for peer in self.peers]
        if self.registries is not None:
            hosts += [parse_address(address)[0] for address in self.registries.addresses]
        return all(is_this_machine(host) for host in hosts)

    def one_company(self, one: Peer, other: Peer) -> bool:
        """Returns True if one peer may know what the other one knows. Works for peers that are not in the file, too.

        Two peers are one company if they have the same operator or name, or if a chain of companies and operators
        connects them.
        """
        return self._parties.same(one, other)

    def company_of(self, operator: str) -> Hashable:
        """Return a value that is equal for operators of one company."""
        return self._parties.company_of(operator)

    def admissible(self, executor: Peer, holders: Collection[Peer]) -> bool:
        """Rule 8: returns True if no company of `holders`, which know a pad's seed, is the company of `executor`."""
        return not any(self.one_company(executor, holder) for holder in holders)

    def companies_of(self, peers: Collection[Peer]) -> int:
        """Number of different companies among these peers."""
        parties = Parties([*self.peers, *peers], self.companies)
        return len({parties.roots(peer) for peer in peers})

    @cached_property
    def _parties(self) -> Parties:
        return Parties(self.peers, self.companies)


def check_choice(federation: Federation) -> None:
    """Checks that every executor has enough helpers of other companies at each of its layers, if the file has `[pads]`.
    Raises `ConfigError`: there are fewer helpers than `[pads] helpers`; `RoleConflictError`: there are too few
    companies among the helpers."""
    k = federation.pad_helpers
    if k is None:
        return
    helpers = federation.helpers
    if k > len(helpers):
        raise ConfigError(
            f"[pads] helpers = {k}, and {len(helpers)} [[provider]] have role = 'helper': add helpers, or lower it"
        )
    if not federation.executors and (companies := federation.companies_of(helpers)) < k:  # a registry lists executors
        raise RoleConflictError(
            f"[pads] helpers = {k} needs helpers of {k} different companies for each pad, but the helpers of this file "
            f"belong to {companies}: add helpers of other companies, or lower it"
        )
    for executor in federation.executors:
        others = [helper for helper in helpers if federation.admissible(executor, [helper])]
        layers = _turning_points(executor.layers, helpers)
        found = {layer: federation.companies_of([h for h in others if _may_serve(h, layer)]) for layer in layers}
        short = {layer: companies for layer, companies in found.items() if companies < k}
        # The layers of an executor may be unknown. Then the check requires enough helpers at one layer at least.
        if short and (executor.layers is not None or len(short) == len(found)):
            layer, companies = next(iter(short.items()))
            where = f" at layer {layer}" if any(helper.layers for helper in helpers) else ""
            raise RoleConflictError(
                f"executor {executor.name!r} has helpers of {companies} companies other than its own{where}, but "
                f"[pads] helpers = {k} needs {k} different companies for each pad: add helpers of other companies, or "
                f"lower it"
            )


def _turning_points(layers: LayerRange | None, helpers: Sequence[Peer]) -> list[int]:
    """The first layer of a range, and the layers of the range at which the set of serving helpers may change."""
    bounds = {bound for h in helpers if h.layers for bound in (h.layers.first, h.layers.last + 1)}
    if layers is None:
        return sorted({0} | bounds)
    return sorted({layers.first} | {bound for bound in bounds if bound in layers})


def _may_serve(peer: Peer, layer: int) -> bool:
    return peer.layers is None or layer in peer.layers
