"""Measures what `experts = ...` reveals about decoded tokens: runs the attack on routes in every mode.

The masking scheme is `pad`, which hides every row. Routes stay visible, and the table shows how much they reveal.
"""

import functools
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from symbiosis_priv.arithmetic.ring import FORWARD
from symbiosis_priv.arithmetic.segments import Counts
from symbiosis_priv.checkpoints.discovery.linears import experts_of
from tenant import RemoteConfig, backend_of
from tenant.options import Experts
from threat_model.attacks.base import Labels, LabelsAttack, Outcome, score_labels
from threat_model.evidence.public import Public
from threat_model.evidence.truth import Truth, Witness
from threat_model.evidence.views import NO_NEIGHBOUR, Exchange, ExecutorView, Recorder, Views
from threat_model.lab import Lab

# Recovers tokens from the experts to which their rows were sent.
#
# With `experts = "counts"`, a request says how many of its rows go to each expert, and so does the request for the
# effects of its pads. While a tenant decodes one sequence, a request has the rows of one token, so its counts are the
# token's route. The router is public: the attacker runs the base model on public text, and counts how often each
# token goes to each expert of each layer. Then it guesses the token whose frequencies fit the routes of all layers
# best (naive Bayes). With `experts = "flat"` all counts of a request are equal, and with `"all"` there are none.


_WINDOW, _BATCH = 32, 16
_SMOOTHING = 0.5


class TokensFromRoutes(LabelsAttack[ExecutorView]):
    """Guesses each decoded token from the counts of its requests."""

    name = "tokens from routes"
    family = "side channel"
    sees = "row counts of experts, layer by layer"
    source = "docs/experts.md; MoEcho, arXiv 2508.15036"

    def run(self, view: ExecutorView, public: Public, rng: torch.Generator) -> Labels | None:
        steps = list(decoding_steps(view))
        if not steps:
            return None
        frequency = torch.bincount(public.corpus, minlength=public.vocabulary).double() + _SMOOTHING
        prior = (frequency / frequency.sum()).log()
        chosen = route_frequencies(public)
        guesses = {}
        for first, routes in steps:
            score = prior.clone()
            for layer, counts in enumerate(routes):
                went = torch.tensor(counts) > 0
                score += torch.where(went, chosen[layer].log(), (-chosen[layer]).log1p()).sum(dim=1)
            guesses[first.order] = score.argmax().reshape(1)
        return guesses

    def score(self, guess: Labels, truth: Truth) -> Outcome:
        """Score the guessed tokens of single rows."""
        real = {order: call.tokens for order, call in truth.calls.items() if call.tokens is not None}
        return score_labels(guess, {order: tokens for order, tokens in real.items() if len(tokens) == 1})


def decoding_steps(view: ExecutorView) -> Iterator[tuple[Exchange, Sequence[Counts]]]:
    """The first request of every pass with one token, and the counts of each layer of experts, if there are any."""
    passes: list[list[Exchange]] = []
    for exchange in view.of(direction=FORWARD):
        if exchange.group == 0:
            passes.append([])
        if passes:
            passes[-1].append(exchange)
    for first, *others in passes:
        if len(first.rows) == 1:
            seen: dict[int, Counts] = {}
            for exchange in others:
                counts = exchange.fields["counts"]
                if isinstance(counts, tuple):
                    seen.setdefault(exchange.group, counts)
            yield first, list(seen.values())[::2]  # a layer has two requests with the same counts


@functools.lru_cache(maxsize=1)  # the same for every mode
def route_frequencies(public: Public) -> Tensor:
    """How often each token goes to each expert, on public text: float64 `[layers, v, experts]`, strictly in 0..1."""
    layers: list[Any] = list(experts_of(public.model).values())
    routes: list[list[Tensor]] = [[] for _ in layers]

    def note(to: list[Tensor]) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...]) -> None:
            to.append(args[1].detach())

        return hook

    hooks = [module.register_forward_pre_hook(note(to)) for module, to in zip(layers, routes, strict=True)]
    windows = public.corpus[: len(public.corpus) // _WINDOW * _WINDOW].view(-1, _WINDOW)
    try:
        with torch.no_grad():
            for batch in windows.split(_BATCH):
                public.model(input_ids=batch, use_cache=False)
    finally:
        for handle in hooks:
            handle.remove()
    tokens = windows.flatten()
    seen = torch.bincount(tokens, minlength=public.vocabulary).double()
    found = []
    for module, parts in zip(layers, routes, strict=True):
        index = torch.cat(parts)
        experts = int(module.num_experts)
        cells = (tokens[:, None] * experts + index).flatten()
        went = torch.bincount(cells, minlength=public.vocabulary * experts).double().view(-1, experts)
        usual = went.sum(dim=0) / went.sum() * index.shape[1]  # of any token
        found.append((went + _SMOOTHING * usual.clamp(0.01, 0.99)) / (seen[:, None] + _SMOOTHING))
    return torch.stack(found).clamp(1e-6, 1 - 1e-6)


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
