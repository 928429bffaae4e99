"""A tenant's federation: which providers it uses, in which roles, and which model they must serve.

federation   reads `federation.toml`; decides which executor may receive rows under which pads (rule 8)
parties      providers, companies and registries; refuses duplicates and conflicting roles (rules 8 and 11)
"""

from symbiosis_priv.federation.federation import Federation, federation_text, load_federation
from symbiosis_priv.federation.parties import Company, Peer, Registries, Traits, check_parties, in_common, traits

__all__ = ["Company", "Federation", "Peer", "Registries", "Traits"]
__all__ += ["check_parties", "federation_text", "in_common", "load_federation", "traits"]
