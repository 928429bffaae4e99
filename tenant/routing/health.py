"""Health of providers, by its former name."""

from tenant.routing.known_provider import FEW_BYTES as FEW_BYTES
from tenant.routing.known_provider import USUAL as USUAL
from tenant.routing.known_provider import ProviderHealth as ProviderHealth
from tenant.routing.known_provider import State as State
from tenant.routing.known_provider import Tolerance as Tolerance
