"""The masking schemes under test: a table. A later scheme is one more line; no attack knows any scheme's name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from threat_model.views import Party

NOBODY: frozenset[Party] = frozenset()
NOT_ALL: frozenset[Party] = frozenset({"executor", "helper", "all but a helper", "network", "neighbour"})
EVERYBODY: frozenset[Party] = NOT_ALL | {"executor+helper"}
OUTSIDERS: frozenset[Party] = frozenset({"network", "neighbour"})

FALLS_OPEN = frozenset(
    {
        "tokens, first layer",
        "tokens, deep layer",
        "adapter by least squares",
        "labels from head gradients",
        "candidate subtraction, forward",
        "candidate subtraction, backward",
        "two-row distinguisher, forward",
        "two-row distinguisher, backward",
    }
)
"""What must succeed where rows can be read: an attack that fails here proves nothing by failing elsewhere."""


@dataclass(frozen=True, kw_only=True)
class Scheme:
    """One way to mask, and what it promises.

    Args:
        name: column of the report.
        family: row of the README's table.
        options: keyword arguments of `RemoteConfig`.
        hides_from: parties that must learn nothing about rows.
        falls_to: attacks that must succeed.
        assumption: what the promise rests on.
        exact: whether results are bit-identical to the reference.
        helpers: how many take part.
    """

    name: str
    family: str
    options: Mapping[str, Any]
    hides_from: frozenset[Party]
    falls_to: frozenset[str] = field(default_factory=frozenset)
    assumption: str
    exact: str
    helpers: int = 0


def paper_pool(size: int, noise: float) -> Scheme:
    """The paper's scheme with `size` noises per layer at `noise` times the activations."""
    return Scheme(
        name=f"pool {size} × {noise:g}",
        family="paper-pool",
        options={"masking": "paper-pool", "paper_pool_size": size, "paper_noise_scale": noise},
        hides_from=OUTSIDERS,
        falls_to=FALLS_OPEN,
        assumption="the executor does not look",
        exact="to float32 rounding",
    )


NONE = Scheme(
    name="none",
    family="none",
    options={"masking": "none"},
    hides_from=OUTSIDERS,
    falls_to=FALLS_OPEN,
    assumption="you trust the executor",
    exact="bit-exact",
)


def pad(helpers: int) -> Scheme:
    """One-time pads whose effects so many helpers compute shares of."""
    return Scheme(
        name="pad" if helpers == 1 else f"pad × {helpers}",
        family="pad",
        options={"masking": "pad"},
        hides_from=NOT_ALL,
        falls_to=frozenset({"collusion, forward", "collusion, backward"}),
        assumption="executor and helpers do not all collude",
        exact="bit-exact",
        helpers=helpers,
    )


PAD, PADS = pad(1), pad(2)
LOCAL = Scheme(
    name="local",
    family="local",
    options={"masking": "local"},
    hides_from=EVERYBODY,
    assumption="none",
    exact="bit-exact",
)

POOL_SIZES = (2, 4, 16)
NOISE_SCALES = (1.0, 16.0, 256.0)

SCHEMES = (NONE, *(paper_pool(size, scale) for scale in NOISE_SCALES for size in POOL_SIZES), PAD, PADS, LOCAL)
QUICK_SCHEMES = (NONE, paper_pool(2, 1.0), paper_pool(16, 16.0), PAD, PADS, LOCAL)
