"""Recomputes the security of the parameters of `masking = "lwe"`, where the lattice estimator is installed.

    python -m threat_model.evidence.lattice_estimate

needs Sage, and `estimator` (github.com/malb/lattice-estimator) on the path; neither is a dependency. It prints log2 of
the number of operations to find one secret c, given P and one masked row of zeros, by the cheapest attacks on sparse
secrets: a hybrid of lattice reduction and guessing (primal, with a meet in the middle) and the dual attack, also with
guessing. An attacker who needs any one of `MOST_ROWS` rows gains at most their number: that many bits are subtracted.
"""

import importlib
import math
from typing import Any, Final

import typer

from symbiosis_priv.arithmetic.lattice import HEIGHT, SIGMA, WEIGHT
from tenant.preparation.hints import MOST_ROWS

COLUMNS: Final = (576, 8192)
"""Widths of masked rows: samples of the secret."""
SETS: Final = ((1280, WEIGHT), (1536, WEIGHT), (HEIGHT, WEIGHT))
"""Lengths of c and their numbers of entries that are not 0. The last set is the one that is used."""


def bits(height: int, weight: int, columns: int) -> dict[str, float]:
    """log2 of the operations of each attack, for one secret. Raises `ModuleNotFoundError`: no estimator."""
    estimator: Any = importlib.import_module("estimator")
    lwe, noise = estimator.LWE, estimator.ND
    half = weight // 2
    errors = noise.CenteredBinomial(round(2 * SIGMA**2))
    parameters = lwe.Parameters(
        n=height, q=2**32, Xs=noise.SparseTernary(half, half, n=height), Xe=errors, m=columns, tag=f"{height}"
    )
    costs = {
        "primal hybrid": lwe.primal_hybrid(parameters, mitm=True, babai=True),
        "dual hybrid": lwe.dual_hybrid(parameters),
    }
    return {name: math.log2(cost["rop"]) for name, cost in costs.items()}


def main() -> None:
    """Print a line for each set of parameters and number of columns."""
    for height, weight in SETS:
        for columns in COLUMNS:
            found = bits(height, weight, columns)
            least = min(found.values()) - math.log2(MOST_ROWS)
            each = ", ".join(f"{name} {value:.0f}" for name, value in found.items())
            typer.echo(f"K {height}, h {weight}, {columns} columns: {each}; any of 2^40 rows: {least:.0f} bits")


if __name__ == "__main__":
    main()
