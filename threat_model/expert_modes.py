"""Measures what `experts = ...` reveals about decoded tokens: runs the attack on routes in every mode.

The masking scheme is `pad`, which hides every row. Routes stay visible, and the table shows how much they reveal.
"""

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from tenant import RemoteConfig, backend_of
from tenant.options import Experts
from threat_model.attacks.base import Outcome
from threat_model.attacks.tokens_from_routes import TokensFromRoutes
from threat_model.evidence.truth import Truth, Witness
from threat_model.evidence.views import NO_NEIGHBOUR, Recorder, Views
from threat_model.lab import Lab

MODES: dict[Experts, bool] = {"all": True, "flat": True, "counts": False}
"""The modes that offload experts; True if a mode promises to hide decoded tokens."""

_EXPERTS = 8
_PROMPT = 8


@dataclass(frozen=True)
class RouteCell:
    """The attack on routes against one mode.

    Args:
        promised: True if the mode promises to hide decoded tokens.
    """

    mode: Experts
    promised: bool
    outcome: Outcome

    @property
    def expected(self) -> bool:
        """True if the attack finds something exactly where the mode promises nothing."""
        return self.outcome.broken != self.promised


def attack_routes(tokens: int) -> tuple[RouteCell, ...]:
    """Decode `tokens` tokens of one sequence in every mode, and attack what the executor saw."""
    attack = TokensFromRoutes()
    cells = []
    with tempfile.TemporaryDirectory() as folder, Lab(Path(folder), experts=_EXPERTS, helpers=1) as lab:
        for mode, promised in MODES.items():
            views, truth = record_decoding(lab, mode, tokens)
            guess = attack.run(views.executor, lab.public, torch.Generator().manual_seed(0))
            assert guess is not None  # one row is one token
            cells.append(RouteCell(mode, promised, attack.score(guess, truth)))
    return tuple(cells)


def record_decoding(lab: Lab, mode: Experts, tokens: int) -> tuple[Views, Truth]:
    """Decode one sequence of the tenant's text, sampled, and record it."""
    recorder, truth = Recorder(), Truth(steps=0)
    more: dict[str, Any] = {"show_routes_while_decoding": True} if mode == "counts" else {}
    config = RemoteConfig(
        federation=lab.federation_path,
        cache=lab.folder / "cache",
        masking="pad",
        experts=mode,
        wiretap=recorder,
        **more,
    )
    model: Any = AutoModelForCausalLM.from_pretrained(
        lab.store.path, quantization_config=config, trust_remote_code=False
    )
    with backend_of(model):
        Witness.install(model, recorder, lab.public, truth)
        prompt = lab.private_windows(1, _PROMPT, seed=1)
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(0)
            model.generate(
                input_ids=prompt,
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=tokens + 1,
                min_new_tokens=tokens + 1,  # the last token is never sent
                do_sample=True,
                pad_token_id=lab.public.pad_token,
            )
    return recorder.views(NO_NEIGHBOUR), truth
