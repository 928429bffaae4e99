"""A tenant's federation: which providers it uses, in which roles, and which model they must serve.

Modules:

    federation_toml   reads `federation.toml`
    federation        the checked file; decides which executor may receive rows under which pads (rule 8)
    parties           decides which entries are one party; refuses duplicates and conflicting roles (rules 8 and 11)
    peers             dataclasses for a provider, a company and the registries
    spelling          normal forms of names and hosts, for comparison
"""

from symbiosis_priv.federation.federation import Federation
from symbiosis_priv.federation.federation_toml import load_federation
from symbiosis_priv.federation.parties import Traits, check_parties, in_common, traits
from symbiosis_priv.federation.peers import Company, Peer, Registries

__all__ = [
    "Company",
    "Federation",
    "Peer",
    "Registries",
    "Traits",
    "check_parties",
    "in_common",
    "load_federation",
    "traits",
]
