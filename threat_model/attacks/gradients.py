"""Reads labels from backward rows: the gradient of cross-entropy reveals the label.

At the head, `g = (softmax(z) - onehot(y)) / n`, whose only negative entry is the label's (Zhao et al., iDLG, arXiv
2001.02610). If the head stays with the tenant, the last block's gradient still points away from the label's row of the
head.
"""

import torch
from torch import Tensor

from symbiosis_priv.arithmetic.ring import BACKWARD
from threat_model.attacks.base import Labels, LabelsAttack, Outcome, score_labels
from threat_model.attacks.exchanges import subtract_candidates, unfold
from threat_model.evidence.public import Public
from threat_model.evidence.truth import NO_LABEL, Truth
from threat_model.evidence.views import ExecutorView


class _GradientAttack(LabelsAttack[ExecutorView]):
    family = "text"
    metric = "labels"

    def score(self, guess: Labels, truth: Truth) -> Outcome:
        labels = {order: call.labels for order, call in truth.calls.items() if call.labels is not None}
        return score_labels(guess, labels, ignore=NO_LABEL)


class HeadLabels(_GradientAttack):
    """Guesses the position of the smallest entry of each backward row of the LM head."""

    name = "labels from head gradients"
    decisive = True
    sees = "backward rows of the LM head"
    source = "iDLG, arXiv 2001.02610"

    def run(self, view: ExecutorView, public: Public, rng: torch.Generator) -> Labels | None:
        if not public.has("lm_head"):
            return None  # a tied head never leaves the tenant
        head = public.group_of("lm_head")
        rows = subtract_candidates(view).rows
        online = [e for e in view.of(group=head, direction=BACKWARD) if e.order in rows]
        return {e.order: unfold(public, e, rows[e.order]).argmin(dim=1) for e in online} or None


class BlockLabels(_GradientAttack):
    """Guesses `argmin_v <g, gamma * head_v>` for each backward row g of the last block: the token v whose row of the
    head, times the weight gamma of the final norm, points away from g the most. Works with a tied head, too."""

    name = "labels from block gradients"
    sees = "backward rows of the last block"
    source = "iDLG through the final norm"

    def run(self, view: ExecutorView, public: Public, rng: torch.Generator) -> Labels | None:
        group = public.group_of("down_proj", layer=public.layers - 1)
        head: Tensor = public.model.get_output_embeddings().weight.double()
        final_norm: Tensor = public.model.get_submodule("model.norm").weight.double()  # type: ignore[assignment]
        directions = head * final_norm
        directions = directions - directions.mean(dim=0)
        rows = subtract_candidates(view).rows
        online = [e for e in view.of(group=group, direction=BACKWARD) if e.order in rows]
        return {e.order: (unfold(public, e, rows[e.order]) @ directions.t()).argmin(dim=1) for e in online} or None
