"""Relayed effects: the executor subtracts blocks from its product, and solves for rows whose product is the difference.

If a helper relayed bare effects, the difference would be the product of the rows, and a matrix with at least as many
outputs as inputs gives the rows back. A block is `e + m`, so the difference is the product less the second keystreams.
"""

import functools

import torch
from torch import Tensor

from symbiosis_priv.arithmetic.ring import FORWARD
from threat_model.attacks.base import DirectedAttack, GuessedRows, RowsAttack
from threat_model.evidence.public import Public
from threat_model.evidence.views import ExecutorView


class RelayedAnswers(DirectedAttack[ExecutorView, GuessedRows], RowsAttack[ExecutorView]):
    """The smallest rows whose products are nearest to the answers without blocks."""

    name = "product less blocks"
    family = "noise removal"
    party = "executor"
    sees = "masked rows, relayed blocks, and its products less the blocks"
    source = "threat model, relay"

    def run(self, view: ExecutorView, public: Public, rng: torch.Generator) -> GuessedRows | None:
        @functools.cache
        def inverse(group: int) -> Tensor:
            weight = public.quantised(group).weight.double()
            found: Tensor = torch.linalg.pinv(weight.t() if self.direction == FORWARD else weight)
            return found

        rows: dict[int, Tensor] = {}
        for exchange in view.of(direction=self.direction):
            if exchange.blocks is not None:
                answer = exchange.answer << view.unused_bits >> view.unused_bits
                rows[exchange.order] = answer.double() @ inverse(exchange.group)
        return rows or None
