"""A tenant's federation: which providers it uses, in which roles, and which model they must serve.

federation   reads `federation.toml`; decides which executor may receive rows under which pads (rule 8)
parties      providers, companies and registries; refuses duplicates and conflicting roles (rules 8 and 11)
"""

from symbiosis_priv.federation.federation import Federation as Federation
from symbiosis_priv.federation.federation import federation_text as federation_text
from symbiosis_priv.federation.federation import load_federation as load_federation
from symbiosis_priv.federation.parties import Company as Company
from symbiosis_priv.federation.parties import Peer as Peer
from symbiosis_priv.federation.parties import Registries as Registries
from symbiosis_priv.federation.parties import Traits as Traits
from symbiosis_priv.federation.parties import check_parties as check_parties
from symbiosis_priv.federation.parties import in_common as in_common
from symbiosis_priv.federation.parties import traits as traits
