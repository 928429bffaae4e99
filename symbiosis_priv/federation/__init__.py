"""A tenant's federation: which providers it uses, in which roles, and which model they must serve.

    file         `federation.toml`
    federation   the file, read and checked: who may be asked under whose pads (rule 8)
    parties      who counts as one, and that nobody is listed twice or in two roles (rules 8 and 11)
    peers        what is known of each provider
    spelling     names and hosts, compared as they are meant

The names that others use are handed on here.
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
