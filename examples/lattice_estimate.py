"""Recomputes the security of the parameters of `masking = "lwe"`, where the lattice estimator is installed.

    python examples/lattice_estimate.py                                  # by the lattice estimator
    python examples/lattice_estimate.py path/to/PrimalMeetLWE/estimator  # by the estimator of the Meet-LWE hybrid

The first needs Sage (`pip install passagemath-standard`), and `estimator` of github.com/malb/lattice-estimator on
PYTHONPATH; the second needs the estimator of eprint 2022/1473, github.com/yonghaason/PrimalMeetLWE. None is a
dependency. The attack is the cheapest that the lattice estimator knows here, the primal hybrid: reduce a lattice, guess
the entries of c outside it with a meet in the middle, and find the others with the reduced basis. It succeeds for one
row with a small probability, and is repeated with other guesses. The Meet-LWE hybrid guesses with several levels of
representations, which sparse ternary secrets suit; in the logs of that estimator, level 2 is the cheapest or nearly so.

An attacker who needs any one of many rows reduces the lattice once, because all rows share P, and tries one guess per
row. So the reduction is counted once for as many tries as there are rows, which the estimator itself does not do.

There are two models of the last step. With Babai's algorithm, the estimator computes the probability that the halves of
a guess meet. For bdd it has no analysis of that probability and takes 1, which favours the attacker.
"""

import importlib
import itertools
import math
import runpy
import sys
from pathlib import Path
from typing import Annotated, Any, Final

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


def meet_bits(tools: dict[str, Any], columns: int, rows: int, *, level: int = 2) -> float:
    """`bits` for the Meet-LWE hybrid and the length of c that is used: a descent over the number of guessed entries, of
    lattice rows and the block size, by steps that become smaller. `tools` are the functions of its estimator."""
    log2, stddev = tools["Log2"], SIGMA
    found: dict[tuple[int, int, int], float] = {}

    def cost(guessed: int, size: int, block: int) -> float:
        known = guessed, size, block
        if known in found:
            return found[known]
        found[known] = math.inf
        outside = HEIGHT + 1 - guessed
        if not (0 < guessed < HEIGHT - 2 and outside < size <= columns + outside and 40 <= block < size):
            return math.inf
        profile = tools["GSA"](2**32, size, outside, block)
        decodes = tools["prob_np"](profile, stddev)
        if not decodes or 6 * stddev > profile[-1] / 2:
            return math.inf
        reduction = tools["log_BKZ_cost"](size, block)
        weights = tools["probs_hw_precompute"](HEIGHT, guessed, WEIGHT)
        start = {"cost": math.inf, "log_p_suc": None, "r": [], "ell": [round(6 * stddev, 2)], "log_fullS": ["-"]}
        lists = ("b_lsh", "R_lsh", "log_cost_list", "log_cost_lsh", "log_S", "log_R", "log_p_sp", "log_p_ncf")
        for ones in range(2, min(WEIGHT, guessed), 2):
            state = start | {"w": [ones]} | {name: ["-"] for name in (*lists, "lsh_dim", "log_p_col")}
            guess = tools["meet_LWE_cost"](
                0, profile, guessed, r=len(profile), w=ones, e=stddev, ell=round(6 * stddev, 2),
                b_lsh=round(12 * stddev, 2), C_proj=10.0, C_lsh=10.0, t=level,
                current_guess=state, abort_bound=reduction,
            )["cost"]  # fmt: skip
            if guess == math.inf:
                if found[known] < math.inf:
                    break
                continue
            hit = weights[ones] if ones < len(weights) else tools["prob_hw"](HEIGHT, guessed, WEIGHT, ones)
            if not hit:
                continue
            tries = -log2(hit) - log2(decodes)
            total = math.log2(2 ** (max(0.0, tries - math.log2(rows)) + reduction) + 2 ** (tries + guess))
            found[known] = min(found[known], total)
        return found[known]

    best: tuple[int, ...] = min(
        itertools.product(range(500, 1400, 200), range(1000, 2400, 200), range(250, 480, 50)), key=lambda at: cost(*at)
    )
    for step in (100, 50, 25, 10, 5):
        while True:
            sizes = step, step, max(1, step // 4)
            near = [tuple(x + s * k for x, s, k in zip(best, sizes, by, strict=True)) for by in _NEIGHBOURS]
            least = min(near, key=lambda at: cost(*at))
            if cost(*least) >= cost(*best):
                break
            best = least
    return cost(*best)


_NEIGHBOURS: Final = tuple(itertools.product((-1, 0, 1), repeat=3))


def main(meet_lwe: Annotated[Path | None, typer.Argument(help="Folder of the Meet-LWE estimator.")] = None) -> None:
    """Print a line for each length of c and width of rows."""
    if meet_lwe is not None:
        sys.path.insert(0, str(meet_lwe))
        tools = runpy.run_path(str(meet_lwe / "estimator.py"))
        for columns in COLUMNS:
            one, any_row = (meet_bits(tools, columns, rows) for rows in (1, MOST_ROWS))
            found = f"one row {one:.0f} bits, any of 2^40 rows {any_row:.0f} bits"
            typer.echo(f"K {HEIGHT}, h {WEIGHT}, {columns} columns, Meet-LWE hybrid: {found}")
        return
    for height in HEIGHTS:
        for columns in COLUMNS:
            for babai in (True, False):
                one, any_row = (bits(height, columns, rows, babai=babai) for rows in (1, MOST_ROWS))
                last = "Babai" if babai else "bdd, lower bound"
                found = f"one row {one:.0f} bits, any of 2^40 rows {any_row:.0f} bits"
                typer.echo(f"K {height}, h {WEIGHT}, {columns} columns, {last}: {found}")


if __name__ == "__main__":
    typer.run(main)
