"""Recomputes the security of the parameters of `masking = "lwe"`, where the lattice estimator is installed.

    python examples/lattice_estimate.py

needs Sage (`pip install passagemath-standard`), and `estimator` of github.com/malb/lattice-estimator on PYTHONPATH;
neither is a dependency. The attack is the cheapest that the estimator knows here, the primal hybrid: reduce a lattice,
guess the entries of c outside it with a meet in the middle, and find the others with the reduced basis. It succeeds for
one row with a small probability, and is repeated with other guesses.

An attacker who needs any one of many rows reduces the lattice once, because all rows share P, and tries one guess per
row. So the reduction is counted once for as many tries as there are rows, which the estimator itself does not do.

There are two models of the last step. With Babai's algorithm, the estimator computes the probability that the halves of
a guess meet. For bdd it has no analysis of that probability and takes 1, which favours the attacker.
"""

import importlib
import math
from typing import Any, Final

import typer

from symbiosis_priv.arithmetic.lattice import HEIGHT, SIGMA, WEIGHT
from tenant.preparation.hints import MOST_ROWS

COLUMNS: Final = (576, 8192)
"""Widths of masked rows: samples of each secret."""
HEIGHTS: Final = (1280, 1536, HEIGHT)
"""Lengths of c. The last one is used."""
_BLOCKS, _GUESSED, _MOST_ONES = range(205, 480, 15), range(300, 1300, 50), 44


def bits(height: int, columns: int, rows: int, *, babai: bool) -> float:
    """log2 of the operations to find c of any one of some rows. Raises `ModuleNotFoundError`: no estimator."""
    estimator: Any = importlib.import_module("estimator")
    primal: Any = importlib.import_module("estimator.lwe_primal")
    secret = estimator.ND.SparseTernary(WEIGHT // 2, WEIGHT // 2, n=height)
    errors = estimator.ND.CenteredBinomial(round(2 * SIGMA**2))
    parameters = estimator.LWE.Parameters(n=height, q=2**32, Xs=secret, Xe=errors, m=columns)
    least = math.inf
    for block in _BLOCKS:
        for guessed in (number for number in _GUESSED if number < height - WEIGHT):
            for ones in range(_MOST_ONES):  # entries of c that are not 0 among the guessed ones
                space, hit = primal.guessing_set_and_hit_probability(guessed, secret, ones)
                choice = {"zeta": guessed, "search_space": space, "hit_probability": hit, "m": columns + height}
                cost = primal.PrimalHybrid.cost(block, parameters, babai=babai, mitm=True, **choice)
                if not float(cost["rop"]) < math.inf:
                    break
                tries = float(cost.get("repetitions", 1))
                reductions, each = max(1.0, tries / rows), float(cost["red"]) / tries
                least = min(least, math.log2(reductions * each + float(cost["svp"])))
    return least


def main() -> None:
    """Print a line for each length of c and width of rows."""
    for height in HEIGHTS:
        for columns in COLUMNS:
            for babai in (True, False):
                one, any_row = (bits(height, columns, rows, babai=babai) for rows in (1, MOST_ROWS))
                last = "Babai" if babai else "bdd, lower bound"
                found = f"one row {one:.0f} bits, any of 2^40 rows {any_row:.0f} bits"
                typer.echo(f"K {height}, h {WEIGHT}, {columns} columns, {last}: {found}")


if __name__ == "__main__":
    main()
