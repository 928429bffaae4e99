"""Over sockets and processes, masked logits, gradients, training and generation have the same bits as the
simulation."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer

from symbiosis_priv.harness.base_model import public_text
from symbiosis_priv.harness.local import LocalFederation
from tenant import BitFitConfig, BottleneckConfig, DiffPruningConfig, MaskBertConfig, RemoteConfig, backend_of
from tests.builds import BUILDS, build
from tests.end_to_end.conftest import Open, Train, adapter_of, config_for, equal

CASES = [("llama", scheme) for scheme in ("pad-1", "pad-2", "local", "none")] + [("gpt2", "pad-1")]
IDS = torch.arange(3, 3 + 2 * 11).view(2, 11)


@pytest.fixture
def base(request: pytest.FixtureRequest) -> tuple[Path, LocalFederation]:
    """A checkpoint and the federation that serves it."""
    path: Path = request.getfixturevalue(request.param)
    federation: LocalFederation = request.getfixturevalue(f"{request.param}_federation")
    return path, federation


Base = tuple[Path, LocalFederation]


@pytest.mark.parametrize(("base", "scheme"), CASES, indirect=["base"])
def test_logits_and_gradients(
    base: Base, scheme: str, open_model: Open, simulated: dict[tuple[Any, ...], list[dict[str, Tensor]]]
) -> None:
    """The bits are the same with compiled passes and without."""
    path, federation = base

    def seen(how: str) -> list[dict[str, Tensor]]:
        found = []
        model = open_model(path, config_for(federation, how))
        model.get_input_embeddings().weight.requires_grad_(True)  # gradients through every layer
        for name in (BUILDS[0], BUILDS[-1]):
            model.zero_grad()
            with build(name):
                out = model(input_ids=IDS, labels=IDS)
                out.loss.backward()
            gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
            found.append(gradients | {"logits": out.logits})
        return found

    expected = simulated.get((path, "gradients")) or simulated.setdefault((path, "gradients"), seen("simulate"))
    assert len(expected[0]) > 10
    assert all(equal(expected[0], other) for other in (*expected[1:], *seen(scheme)))


@pytest.mark.parametrize("base", ["llama", "gpt2"], indirect=True)
def test_20_steps_of_training(base: Base, open_model: Open, train: Train) -> None:
    path, federation = base

    def trained(model: Any) -> tuple[dict[str, Tensor], list[float]]:
        trainer = train(model, steps=20)
        return adapter_of(model), [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

    expected, expected_losses = trained(open_model(path, config_for(federation, "simulate")))
    model = open_model(path, config_for(federation, "pad-1"))
    adapter, losses = trained(model)
    assert equal(expected, adapter)
    assert expected_losses == losses
    assert len(losses) == 20
    assert losses[-1] < losses[0]
    ledger = backend_of(model).products.ledger()  # type: ignore[attr-defined]
    assert ledger.answers_verified == ledger.rows > 0
    assert ledger.answers_rejected == 0


GENERATIONS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampled": {"do_sample": True, "temperature": 0.9, "top_k": 20},
    "beams": {"do_sample": False, "num_beams": 3},
}


@pytest.mark.parametrize("base", ["llama", "gpt2"], indirect=True)
def test_64_tokens(base: Base, open_model: Open) -> None:
    """Greedy; fewer tokens sampled with a seed and with beams; a batch with padding on the left; a single prompt."""
    path, federation = base
    ids, mask = IDS.clone(), torch.ones_like(IDS)
    ids[0, :4] = mask[0, :4] = 0

    def tokens(how: str) -> dict[str, Tensor]:
        model = open_model(path, config_for(federation, how)).eval()

        def made(name: str, rows: slice = slice(None)) -> Tensor:
            torch.manual_seed(13)
            new = 64 if name == "greedy" else 8
            length: dict[str, int] = {"max_new_tokens": new, "min_new_tokens": new, "pad_token_id": 0}
            found: Tensor = model.generate(
                input_ids=ids[rows], attention_mask=mask[rows], **length, **GENERATIONS[name]
            )
            return found

        return {name: made(name) for name in GENERATIONS} | {"alone": made("greedy", slice(1, None))}

    expected, found = tokens("simulate"), tokens("pad-1")
    assert found["greedy"].shape == (2, 11 + 64)
    for name, its in found.items():
        assert torch.equal(its, expected[name]), name


VARIANTS: dict[str, dict[str, Any]] = {
    "one pass": {},
    "gradient accumulation": {"gradient_accumulation_steps": 3},
    "gradient checkpointing": {
        "activation_checkpointing": True,
        "activation_checkpointing_kwargs": {"use_reentrant": False},
    },
    "reentrant checkpointing": {
        "activation_checkpointing": True,
        "activation_checkpointing_kwargs": {"use_reentrant": True},
    },
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_ways_to_train(
    variant: str,
    llama: Path,
    llama_federation: LocalFederation,
    open_model: Open,
    train: Train,
    simulated: dict[tuple[Any, ...], dict[str, Tensor]],
) -> None:
    """Gradient checkpointing changes no bit."""
    for scheme in ("simulate", "pad-1"):
        model = open_model(llama, config_for(llama_federation, scheme))
        train(model, steps=2, **VARIANTS[variant])
        once = variant if variant == "gradient accumulation" else "one pass"
        assert equal(adapter_of(model), simulated.setdefault((once,), adapter_of(model)))


# Quality: the effect of the ring's rounding on a trained model


def test_quality_against_the_unquantised_model(trained: Path, open_model: Open) -> None:
    """At least 99 % of the most likely next tokens agree, and perplexity differs by less than 1 %."""
    tokenizer = AutoTokenizer.from_pretrained(trained)
    stream = tokenizer(public_text(seed=1, sentences=600), return_tensors="pt")["input_ids"][0]
    ids = stream[: len(stream) // 64 * 64].view(-1, 64)
    assert ids.numel() > 4_000
    full: Any = AutoModelForCausalLM.from_pretrained(trained)
    split = open_model(trained, RemoteConfig(masking="simulate"), adapter=False)
    with torch.no_grad():
        logits = [torch.cat([m.eval()(input_ids=part).logits for part in ids.split(16)]) for m in (full, split)]
    losses = [float(cross_entropy(z[:, :-1].flatten(0, 1), ids[:, 1:].flatten())) for z in logits]
    assert losses[0] < 0.7 * math.log(512)  # the model is trained
    agreement = (logits[0].argmax(-1) == logits[1].argmax(-1)).double().mean()
    assert float(agreement) >= 0.99
    assert abs(math.exp(losses[1] - losses[0]) - 1) < 0.01


# Methods

SMALL: dict[str, Any] = {"target_modules": "all-linear", "r": 4}
METHODS: dict[str, tuple[str, Callable[[], peft.PeftConfig]]] = {
    "lora": ("llama", lambda: peft.LoraConfig(init_lora_weights=False, **SMALL)),
    "bottleneck": ("llama", lambda: BottleneckConfig(bottleneck_dim=8, target_modules="all-linear")),
    "bitfit": ("gpt2", BitFitConfig),
    "all biases": ("gpt2", lambda: peft.LoraConfig(bias="all", fan_in_fan_out=True, **SMALL)),
    "diff pruning": ("llama", lambda: DiffPruningConfig(density=0.05, target_modules="all-linear")),
    "maskbert": ("llama", lambda: MaskBertConfig(target_modules="all-linear")),
    "dora": ("llama", lambda: peft.LoraConfig(use_dora=True, init_lora_weights=False, **SMALL)),
    "pissa": ("llama", lambda: peft.LoraConfig(init_lora_weights="pissa", **SMALL)),
}


@pytest.mark.filterwarnings("ignore::UserWarning")  # PEFT's own
@pytest.mark.parametrize("name", METHODS)
def test_methods_over_live_providers(
    name: str, open_model: Open, train: Train, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """Trained with pads: the simulation's bits. Saved, and loaded into plain transformers: the same logits, up to the
    rounding of weights, which changes the logits of the base model by as much."""
    kind, config = METHODS[name]
    path: Path = request.getfixturevalue(kind)
    federation: LocalFederation = request.getfixturevalue(f"{kind}_federation")
    adapters, losses = [], []
    for scheme in ("simulate", "pad-1"):
        base = open_model(path, config_for(federation, scheme), adapter=False)
        with torch.no_grad():
            without = base.eval()(input_ids=IDS).logits
        torch.manual_seed(11)
        model: Any = peft.get_peft_model(base, config())
        trainer = train(model, steps=2)
        adapters.append(adapter_of(model))
        losses.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
    assert equal(*adapters)
    assert losses[0] == losses[1]
    model.save_pretrained(str(tmp_path / "adapter"))
    plain: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    with torch.no_grad():
        logits = model.eval()(input_ids=IDS).logits
        rounding = (plain(input_ids=IDS).logits - without).abs().max()
        home: Any = peft.PeftModel.from_pretrained(plain, str(tmp_path / "adapter")).eval()
        difference = (home(input_ids=IDS).logits - logits).abs().max()
    assert (logits - without).abs().max() > 10 * rounding
    assert difference <= 4 * rounding


# bfloat16 and float16 checkpoints with an empty cache: no weights cached, no kernel chosen yet


# Each has widths that no other test has, so that its kernels are chosen here. The last column's index rounds up in the
# checkpoint's dtype, so code that computes indices in this dtype would index outside the matrix.
MLP_WIDTHS = {torch.float32: 4099, torch.bfloat16: 4125, torch.float16: 4103}


@pytest.mark.parametrize("dtype", MLP_WIDTHS, ids=str)
def test_a_cold_start_is_bit_exact(
    dtype: torch.dtype, save_llama: Callable[..., Path], open_model: Open, tmp_path: Path
) -> None:
    path = save_llama(hidden_size=48, intermediate_size=MLP_WIDTHS[dtype], num_hidden_layers=1, pad_token_id=0)
    full: Any = AutoModelForCausalLM.from_pretrained(path)
    full.to(dtype).save_pretrained(path)
    outcomes = []
    with LocalFederation(path, tmp_path / "run") as local:
        masking: Any
        for masking in ("pad", "simulate"):
            federation: Any = {"federation": local.federation} if masking == "pad" else {}
            config = RemoteConfig(masking=masking, cache=tmp_path / masking, **federation)
            outcomes.append(forward_backward_generate(open_model(path, config)))
    assert {t.dtype for t in outcomes[0].values() if t.is_floating_point()} >= {dtype}
    assert outcomes[0].keys() == outcomes[1].keys()
    for name, tensor in outcomes[0].items():
        assert torch.equal(tensor, outcomes[1][name]), name


def forward_backward_generate(model: Any) -> dict[str, Tensor]:
    """Logits, every gradient (including the embedding's, so through all layers) and greedy tokens."""
    model.get_input_embeddings().weight.requires_grad_(True)
    out = model(input_ids=IDS, labels=IDS)
    out.loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert len(gradients) > 10
    tokens = model.eval().generate(
        input_ids=IDS, attention_mask=torch.ones_like(IDS), max_new_tokens=3, min_new_tokens=3, pad_token_id=0
    )
    return gradients | {"logits": out.logits, "tokens": tokens}
