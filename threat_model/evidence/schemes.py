"""The masking schemes under test: those of `tenant.masking.registry`, some of them in several settings.

The schemes themselves state their claims, and no attack depends on a scheme's name.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tenant.masking import scheme as masking
from tenant.masking.registry import registered
from threat_model.evidence.views import Party

OUTSIDERS: frozenset[Party] = frozenset({"network", "neighbour"})


@dataclass(frozen=True, kw_only=True)
class AttackedScheme:
    """A registered masking scheme in one setting. `name`: column of the report."""

    masking: masking.Scheme
    name: str
    settings: Mapping[str, Any]
    helpers: int

    @property
    def family(self) -> str:
        """Row of the README's table."""
        return self.masking.name

    @property
    def options(self) -> Mapping[str, Any]:
        """Keyword arguments of `RemoteConfig`."""
        return {"masking": self.masking.name, **self.settings}

    @property
    def hides_from(self) -> frozenset[Party]:
        """Parties that must learn nothing about rows. Outsiders are always among them, except those that record links
        and compute TLS's secrets later, from whom only masks hide rows."""
        later: frozenset[Party] = frozenset({"recorder"} if "executor" in self.masking.hides_from else ())
        return OUTSIDERS | later | self.masking.hides_from


def variant(scheme: masking.Scheme, *, name: str | None = None, helpers: int = 1, **settings: Any) -> AttackedScheme:
    """One setting of a registered scheme. `name`: column of the report; the scheme's own name if None."""
    helpers = helpers if "helper" in scheme.roles else 0
    return AttackedScheme(masking=scheme, name=name or scheme.name, settings=settings, helpers=helpers)


_REMOTE = {scheme.name: scheme for scheme in registered() if scheme.roles}  # the other schemes send nothing


def paper_pool(size: int, noise: float) -> AttackedScheme:
    """The paper's scheme: `size` noise rows per layer, with `noise` times the activations' standard deviation."""
    name = f"pool {size} × {noise:g}"
    return variant(_REMOTE["paper-pool"], name=name, masking_options={"pool_size": size, "noise_scale": noise})


NONE, LOCAL = variant(_REMOTE["none"]), variant(_REMOTE["local"])
PAD, PADS, PADS_3 = (
    variant(_REMOTE["pad"], name="pad" if helpers == 1 else f"pad × {helpers}", helpers=helpers)
    for helpers in (1, 2, 3)
)
PAD_24 = variant(_REMOTE["pad"], name="pad, 24 bits", ring_bits=24)

POOL_SIZES = (2, 4, 16)
NOISE_SCALES = (1.0, 16.0, 256.0)


def _all(pools: tuple[AttackedScheme, ...], pads: tuple[AttackedScheme, ...]) -> tuple[AttackedScheme, ...]:
    listed = (NONE, *pools, *pads, LOCAL)
    return (*listed, *(variant(s) for name, s in _REMOTE.items() if name not in {one.family for one in listed}))


_POOLS = tuple(paper_pool(size, scale) for scale in NOISE_SCALES for size in POOL_SIZES)
SCHEMES = _all(_POOLS, (PAD, PADS, PADS_3, PAD_24))
QUICK_SCHEMES = _all((paper_pool(16, 16.0),), (PAD, PADS, PAD_24))
