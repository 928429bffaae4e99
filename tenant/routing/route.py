"""Known providers, by their former name."""

from tenant.routing.known_provider import KnownProvider
from tenant.routing.known_provider import ProviderFigures as ProviderFigures

Route = KnownProvider
