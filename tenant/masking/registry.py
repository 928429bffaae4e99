"""The masking schemes by name."""

from symbiosis_priv.errors import ConfigError
from tenant.masking.local import Local
from tenant.masking.none import NoMasking
from tenant.masking.pad import OneTimePads
from tenant.masking.paper_pool import PaperPool
from tenant.masking.scheme import BackendScheme, SessionScheme
from tenant.masking.simulate import Simulate

AnyScheme = SessionScheme | BackendScheme

_schemes: dict[str, AnyScheme] = {}


def register(scheme: AnyScheme) -> None:
    """Make a scheme known to `RemoteConfig`, to the threat model and to the README's table. Raises `ConfigError` if
    another scheme has its name."""
    if scheme.name in _schemes:
        raise ConfigError(f"masking = {scheme.name!r} is registered already; give the new scheme a name of its own")
    _schemes[scheme.name] = scheme


def unregister(name: str) -> None:
    del _schemes[name]


def registered() -> tuple[AnyScheme, ...]:
    """Return all schemes in the order in which they were registered."""
    return tuple(_schemes.values())


def scheme_named(name: str) -> AnyScheme:
    """Look up a scheme. Raises `ConfigError`, with a list of the schemes, if no scheme has this name."""
    if name not in _schemes:
        raise ConfigError(f"masking = {name!r} is unknown; choose one of {', '.join(_schemes)}")
    return _schemes[name]


def session_scheme(name: str) -> SessionScheme:
    """Look up a scheme that uses a session. Raises `ConfigError` if no such scheme has this name."""
    scheme = scheme_named(name)
    if not isinstance(scheme, SessionScheme):
        raise ConfigError(f"masking = {name!r} does not run over a session; open it with `RemoteConfig(masking=...)`")
    return scheme


for _scheme in (OneTimePads(), Local(), NoMasking(), PaperPool(), Simulate()):
    register(_scheme)
