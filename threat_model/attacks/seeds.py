"""Masks from a generator that is not a cipher: the attack tries all seeds.

`torch.manual_seed(small)` has a few thousand possible streams. One request identifies the stream: in the ring the right
stream leaves small integers, in floats it leaves vectors in the direction of the rows. The stream then unmasks every
other request (rule 1).
"""

import math

import torch
from torch import Tensor

from threat_model.attacks.base import Rows, RowsAttack
from threat_model.attacks.reading import carriers
from threat_model.evidence.public import Public
from threat_model.evidence.views import Exchange, ExecutorView

_SEEDS, _SMALL, _ALIKE = 2048, 1 << 27, 0.5


class SeedRecovery(RowsAttack[ExecutorView]):
    """Tries seeds 0..2047 of torch's generator, as integers and as normals, in the order of requests. Without a
    matching seed there is no guess."""

    name = "seed of the generator"
    family = "generator"
    party = "executor"
    sees = "rows, in order"
    source = "rule 1"

    def run(self, view: ExecutorView, public: Public, rng: torch.Generator) -> Rows:
        online = carriers(view)
        for seed in range(_SEEDS):
            stream = torch.Generator().manual_seed(seed)
            if _taken_off(online[0], stream) is not None:
                stream = torch.Generator().manual_seed(seed)
                rows = {e.order: _taken_off(e, stream) for e in online}
                return {order: part for order, part in rows.items() if part is not None}
        return {}


def _taken_off(exchange: Exchange, stream: torch.Generator) -> Tensor | None:
    x = exchange.rows
    if exchange.arithmetic == "ring":
        mask = torch.randint(-(1 << 31), 1 << 31, x.shape, generator=stream).to(torch.int32)
        left = (x - mask).double()
        return left if float(left.abs().max()) < _SMALL else None
    noise = torch.randn(x.shape, generator=stream).double()
    rows = x.double()
    scale = float((rows * noise).sum() / noise.square().sum())
    if abs(scale) * float(noise.norm()) < _ALIKE * float(rows.norm()):
        return None
    power = 2.0 ** round(math.log2(abs(scale)))  # people choose round numbers
    return rows - (power if abs(scale / power - 1) < 0.05 else scale) * noise
