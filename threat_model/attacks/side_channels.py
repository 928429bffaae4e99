"""Side channels that no scheme hides: row counts, stage and time. These attacks succeed everywhere, as "not hidden".
The last attack is an exception: health reports once counted the requests of all tenants, and must not do so again.

Rows are masked, but their number is visible. The rows of a request show batch x tokens; a backward request shows
training; one row per sequence and token shows generation, and the last request shows the length of the answer.
"""

import itertools
from collections import Counter
from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from symbiosis_priv.arithmetic.ring import BACKWARD
from symbiosis_priv.network import wire
from threat_model.attacks.base import Attack, Outcome
from threat_model.attacks.exchanges import generation, noises, prefills
from threat_model.evidence.public import Public
from threat_model.evidence.truth import Truth
from threat_model.evidence.views import ExecutorView, NeighbourView, NetworkView, Packet

Facts = Mapping[str, object]
_HEADER_MOST, _TOLERANCE = 250, 0.1


class _SideChannel:
    metric = "facts right"
    chance = "0"
    by_design: ClassVar[bool] = True

    def score(self, guess: Facts, truth: Truth) -> Outcome:
        """Score the claimed facts: a claim that is true is a hit."""
        real: Facts = {
            "training steps": truth.steps,
            "prompts": truth.batches,
            "tokens generated": truth.generated,
            "tokens generated in all": sum(truth.generated),
            "sequences": truth.batches[-1][0] if truth.batches else 0,
        }
        right = sum(real[name] == value for name, value in guess.items())
        return Outcome(right, len(guess), 0.0, 0.0 if right == len(guess) else 1.0)


class ExecutorShapes(_SideChannel, Attack[ExecutorView, Facts]):
    """Counts requests and rows."""

    name = "shapes, executor"
    sees = "row counts, directions, order"
    source = "rule 9"

    def run(self, view: ExecutorView, public: Public, rng: torch.Generator) -> Facts:
        last = len(public.manifest.groups) - 1
        _, gradients = noises(view, last, BACKWARD)
        found = prefills(view, 0)
        starts = [*(e.order for e, _, _ in found), float("inf")]
        steps = [e.order for e in generation(view) if e.group == 0]
        lengths = [sum(a <= o < b for o in steps) for a, b in itertools.pairwise(starts)]
        prompts = [(batch, length) for _, batch, length in found]
        return {"training steps": len(gradients), "prompts": prompts, "tokens generated": lengths}


class NetworkShapes(_SideChannel, Attack[NetworkView, Facts]):
    """Reads row counts from the sizes of frames: requests and answers have one size per row, by the layer's widths."""

    name = "sizes, network"
    party = "network"
    sees = "frame sizes and times under TLS"
    source = "traffic analysis"

    def run(self, view: NetworkView, public: Public, rng: torch.Generator) -> Facts | None:
        volume: Counter[str] = Counter()
        for packet in view.packets:
            volume[packet.endpoint] += packet.size if packet.upward else 0
        executor, _ = volume.most_common(1)[0]
        stream = [p for p in view.packets if p.endpoint == executor]
        group = public.group_of("down_proj", layer=0)  # no other group has these widths, and its two directions differ
        entry, layers = public.manifest.groups[group], public.layers
        ring = wire.encoding_of("ring", view.ring_bits)
        forward = _row_counts(stream, entry.inputs, entry.stacked_outputs, ring)
        backward = _row_counts(stream, entry.stacked_outputs, entry.inputs, ring)
        training = max(backward, key=lambda rows: backward[rows], default=0)
        served = {rows: n // layers for rows, n in forward.items() if rows != training and n >= layers}
        if not served:
            return None
        sequences = max(served, key=lambda rows: served[rows])
        # a multiple of the number of sequences is a prompt, and yields the first token of each sequence
        made = sum(n for rows, n in served.items() if rows % sequences == 0)
        return {"training steps": backward[training] // layers, "sequences": sequences, "tokens generated in all": made}


def _row_counts(stream: list[Packet], inputs: int, outputs: int, ring: wire.Encoding) -> Counter[int]:
    """Number of requests by row count. A row count fits if it leaves the sizes of two headers."""
    seen: Counter[int] = Counter()
    for up, down in itertools.pairwise(stream):
        rows = up.size // ring.size(1, inputs)
        headers = (up.size - ring.size(rows, inputs), down.size - ring.size(rows, outputs))
        if up.upward and not down.upward and rows and all(0 < h < _HEADER_MOST for h in headers):
            seen[rows] += 1
    return seen


class NeighbourCounts(_SideChannel, Attack[NeighbourView, Facts]):
    """Counts a neighbour's requests, if health reports count the requests of all tenants: it subtracts its own."""

    name = "health counter, neighbour"
    party = "neighbour"
    sees = "its own health reports of the executor"
    source = "found here"
    by_design = False

    def run(self, view: NeighbourView, public: Public, rng: torch.Generator) -> Facts | None:
        if len(view.requests) < 2:
            return None
        return {"requests": view.requests[-1][1] - view.requests[0][1]}

    def score(self, guess: Facts, truth: Truth) -> Outcome:
        """Score the victim's number of requests, within 10 % (a scheme may ask for effects, too)."""
        guessed, real = guess["requests"], len(truth.calls)
        right = isinstance(guessed, int) and abs(guessed - real) <= _TOLERANCE * real
        return Outcome(int(right), 1, 0.0, 0.0 if right else 1.0)


class MixedBatches(Attack[NeighbourView, Tensor]):
    """A second tenant's rows share products with the victim's. Tests if these change the second tenant's answers."""

    name = "neighbour in the same batch"
    party = "neighbour"
    sees = "its own rows and answers"
    source = "threat model, between tenants"
    metric = "answers that are not its own product"
    chance = "0"

    def run(self, view: NeighbourView, public: Public, rng: torch.Generator) -> Tensor:
        return (view.own != 0).any(dim=1)

    def score(self, guess: Tensor, truth: Truth) -> Outcome:
        hits = int(guess.sum())
        return Outcome(hits, len(guess), 0.0, 0.0 if hits else 1.0)
