"""Architectures, PEFT methods, and the result of each pair: on a split model, and on a plain model.

A pair is tried twice with the same seeds, on a split model and on the plain one. Both adapters are then loaded into a
new plain model ("at home"). The plain model computes with the same weights as a provider: the checkpoint is written
from integers, so that quantising it changes nothing. The two models then differ only by the rounding of rows, about
2^-20 of a row. The adapters are trained until their effect is large. The tolerances below follow from both.
"""

import copy
import functools
import tomllib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from peft import PeftConfig, PeftModel, get_peft_model
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING
from torch import Tensor

from symbiosis_priv.checkpoints.discovery.linears import is_linear
from symbiosis_priv.errors import UnsupportedMethodError
from tenant import RemoteConfig, rounded_model
from tests.compatibility import families
from tests.compatibility.families import build

STAGES = FORWARD, BACKWARD, GENERATE, HOME = "FBGH"
TOLERANCE = 1e-2
"""Tolerance, as a share of an adapter's effect on the logits. If a model ignores the adapter of a single layer, the
difference is larger: `test_one_ignored_layer_would_be_found`."""

IDS = torch.arange(3, 15).view(2, 6) * 7 % 96
LABELS = {"SEQ_CLS": torch.tensor([0, 1])}


# Architectures, and PEFT methods


@dataclass(frozen=True)
class Architecture:
    """A small model of one architecture."""

    name: str
    stored: str
    """The class with which the checkpoint is saved, and which providers serve."""
    changes: dict[str, Any] = field(default_factory=dict, hash=False)
    """Fields of the configuration (`tests.compatibility.families.small`)."""
    task: str = "CAUSAL_LM"
    norms: str = r".*norm.*"
    """Names of norms. PEFT knows the norms of some architectures only."""
    linears: str = "all-linear"
    """Names of the modules that get an adapter. (PEFT counts a new classification head as a linear.)"""

    @property
    def generates(self) -> bool:
        return self.task != "SEQ_CLS"

    def build(self) -> Any:
        sizes = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None, "intermediate_size": 64}
        return build(self.stored, **sizes | self.changes)


_DATA: dict[str, Any] = tomllib.loads(Path(__file__).with_name("methods.toml").read_text(encoding="utf-8"))
ARCHITECTURES = {name: Architecture(name, **fields) for name, fields in _DATA["architectures"].items()}
METHODS: dict[str, dict[str, Any]] = _DATA["methods"]
NOT_TRIED = {"ADAMSS": "AdaMSS, which needs scikit-learn"}
SAMPLE = (
    *("qwen3", "gpt2", "mixtral", "bamba", "nomic_bert", "t5", "vit", "clip", "whisper", "llava", "gpt_oss in mxfp4"),
)
"""The families that are tried by default."""
_TASKS = {"POLY", "MULTITASK_PROMPT_TUNING"}  # methods that need the task of each row as an argument


# The result of a pair


@dataclass
class Attempt:
    """A model with an adapter, up to the stage that failed."""

    stages: set[str] = field(default_factory=set)
    error: Exception | None = None
    start: Tensor | None = None
    gradient: Tensor | None = None
    logits: Tensor | None = None
    tokens: Tensor | None = None


seed = torch.default_generator.manual_seed  # `torch.manual_seed` would seed GPUs, too, which takes longer


class Pair:
    """One PEFT method on one architecture."""

    def __init__(self, architecture: Architecture, method: str, *, checkpoint: Path, folder: Path) -> None:
        self.architecture = architecture
        self.options = copy.deepcopy(METHODS[method])
        self.kind = self.options.pop("kind")
        self.checkpoint = checkpoint
        self.folder = folder
        self.extra = {"task_ids": torch.zeros(2, dtype=torch.long)} if self.kind in _TASKS else {}

    def found(self) -> str:
        """The stages that the pair passes; "–" if the split model refuses it by name, "·" if plain PEFT fails, too.

        Raises:
            AssertionError: only one of the split model and the plain model passes a stage.
        """
        split = self.attempt(split=True)
        if refused(split.error):
            return "–" if self.attempt(split=False, whole=False).stages else "·"
        # a stage that the split model passes at home has passed on a plain model
        missing = set(STAGES) - split.stages - (set() if self.architecture.generates else {GENERATE})
        plain = self.attempt(split=False, whole=bool(missing))
        passed = split.stages if missing else split.stages & {FORWARD, BACKWARD}
        assert passed == plain.stages, f"split: {passed} {split.error!r}, plain: {plain.stages} {plain.error!r}"
        if FORWARD in plain.stages:
            assert plain.start is not None
            assert close(split.start, plain.start, scale=plain.start.abs().max())
        if BACKWARD in plain.stages:
            assert plain.gradient is not None
            assert close(split.gradient, plain.gradient, scale=plain.gradient.abs().max())
        return "".join(stage for stage in STAGES if stage in split.stages) or "·"

    def attempt(self, *, split: bool, whole: bool = True) -> Attempt:
        """Try the stages one after the other; only the first two unless `whole`."""
        attempt = Attempt()
        folder = self.folder / ("split" if split else "plain")
        try:
            model = self._train(attempt, split=split, steps=2 if whole else 1)
            if whole:
                attempt.logits = self.logits(model)
                model.save_pretrained(str(folder))
                if self.architecture.generates:
                    attempt.tokens = self._generate(model)
                self._go_home(attempt, folder)
        except Exception as error:  # PEFT's own code, on a model that it may not support
            attempt.error = error
        return attempt

    def base(self, *, split: bool) -> Any:
        return copy.deepcopy(load(self.architecture, self.checkpoint, split))

    def _config(self) -> PeftConfig:
        kind: Any = PEFT_TYPE_TO_CONFIG_MAPPING[getattr(peft.PeftType, self.kind)]
        options = dict(self.options)
        if self.kind == "LN_TUNING":
            options["target_modules"] = self.architecture.norms
        elif "target_modules" in options:
            options["target_modules"] = self.architecture.linears
        if self.kind == "XLORA":  # it mixes saved LoRAs
            options["adapters"] = {name: str(self.folder / f"lora {name}") for name in ("0", "1")}
            for name, folder in options["adapters"].items():
                random: Any = {"target_modules": self.architecture.linears, "r": 4, "init_lora_weights": False}
                seed(4 + int(name))
                lora = peft.LoraConfig(task_type=self.architecture.task, **random)
                get_peft_model(self.base(split=False), lora).save_pretrained(folder)
        config: PeftConfig = kind(task_type=self.architecture.task, **options)
        return config

    def _train(self, attempt: Attempt, *, split: bool, steps: int) -> Any:
        base = self.base(split=split)
        base.config.use_cache = self.kind != "XLORA"  # X-LoRA requires it
        config = self._config()
        seed(3)
        model: Any = get_peft_model(base, config)
        trained = [p for p in model.parameters() if p.requires_grad]
        with torch.no_grad():
            for parameter in trained:  # start with an adapter that has an effect
                parameter.add_(torch.randn_like(parameter), alpha=0.02)
        attempt.start = self.logits(model)
        optimizer = torch.optim.Adam(trained, lr=0.03)
        model.train()
        for step in range(steps):
            seed(20 + step)
            loss = model(input_ids=IDS, labels=LABELS.get(self.architecture.task, IDS), **self.extra).loss
            attempt.stages.add(FORWARD)
            loss.backward()
            if attempt.gradient is None:
                attempt.gradient = torch.cat([p.grad.flatten() for p in trained if p.grad is not None])
                assert bool(attempt.gradient.any())
                attempt.stages.add(BACKWARD)
            optimizer.step()
            optimizer.zero_grad()
        return model

    def _go_home(self, attempt: Attempt, folder: Path) -> None:
        """Load the saved adapter into a plain model: same logits, and the generated tokens are its first choices."""
        base = self.base(split=False)
        base.config.use_cache = self.kind != "XLORA"
        model = PeftModel.from_pretrained(base, str(folder)).eval()
        logits = self.logits(model)
        effect = (logits - plain_logits(self.architecture, self.checkpoint)).abs().max()
        assert effect > 1e-3
        if close(attempt.logits, logits, scale=effect):
            attempt.stages.add(HOME)
        if attempt.tokens is not None and self._chooses(model, attempt.tokens, effect):
            attempt.stages.add(GENERATE)

    def logits(self, model: Any) -> Tensor:
        return logits_of(self.architecture, model, **self.extra)

    def _generate(self, model: Any) -> Tensor | None:
        try:
            tokens: Tensor = model.generate(
                input_ids=IDS, attention_mask=torch.ones_like(IDS), max_new_tokens=3, do_sample=False, **self.extra
            )
        except UnsupportedMethodError:
            raise
        except Exception:  # some adapters cannot, on any model
            return None
        return tokens

    def _chooses(self, model: Any, tokens: Tensor, effect: Tensor) -> bool:
        decoder = self.architecture.task == "SEQ_2_SEQ_LM"
        inputs = {"input_ids": IDS, "decoder_input_ids": tokens} if decoder else {"input_ids": tokens}
        with torch.no_grad():
            logits = model(**inputs, **self.extra).logits[:, -tokens.shape[1] :]
        first = 1 if decoder else IDS.shape[1]
        chances = logits[:, first - 1 : -1]
        chosen = chances.gather(-1, tokens[:, first:, None]).squeeze(-1)
        return bool((chances.amax(-1) - chosen <= TOLERANCE * effect).all())


KINDS: dict[str, Any] = {
    "CAUSAL_LM": transformers.AutoModelForCausalLM,
    "SEQ_2_SEQ_LM": transformers.AutoModelForSeq2SeqLM,
    "SEQ_CLS": transformers.AutoModelForSequenceClassification,
}


@functools.cache
def load(architecture: Architecture, checkpoint: Path, split: bool) -> Any:
    options: dict[str, Any] = {"quantization_config": RemoteConfig(masking="simulate")} if split else {}
    torch.manual_seed(2)  # the warning about a head that the checkpoint does not have
    return KINDS[architecture.task].from_pretrained(checkpoint, dtype=torch.float32, **options).eval()


def logits_of(architecture: Architecture, model: Any, **extra: Any) -> Tensor:
    """The logits without those of virtual tokens."""
    inputs: dict[str, Any] = {"input_ids": IDS, **extra}
    if architecture.task == "SEQ_2_SEQ_LM":
        inputs["decoder_input_ids"] = IDS
    with torch.no_grad():
        logits: Tensor = model.eval()(**inputs).logits
    return logits[:, -IDS.shape[1] :] if logits.dim() == 3 else logits


@functools.cache
def plain_logits(architecture: Architecture, checkpoint: Path) -> Tensor:
    """The logits of the plain model without an adapter."""
    return logits_of(architecture, copy.deepcopy(load(architecture, checkpoint, False)))


def close(a: Tensor | None, b: Tensor, *, scale: Tensor) -> bool:
    """Returns True if two tensors differ by rounding at most, relative to `scale`."""
    return a is not None and a.shape == b.shape and bool(((a - b).abs() <= TOLERANCE * scale).all())


def refused(error: Exception | None) -> bool:
    """Returns True for a refusal by name, by this project or by PEFT because of the layer's class."""
    return isinstance(error, UnsupportedMethodError) or "Remote" in str(error)


def write_checkpoint(architecture: Architecture, folder: Path) -> Path:
    """Write a checkpoint whose offloaded weights are integers times a scale, so that quantising changes none of
    them."""
    model = architecture.build()
    modules = dict(model.named_modules())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                torch.nn.init.normal_(parameter, std=0.1)
            elif is_linear(modules[name.rpartition(".")[0]]):
                torch.nn.init.normal_(parameter, std=0.08)
    model.save_pretrained(folder)
    rounded_model(folder, kind=type(model)).save_pretrained(folder)
    return folder


# Fixtures


@pytest.fixture(scope="session")
def new_pair(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Pair]:
    """`new_pair(architecture, method)`; each checkpoint is made once."""

    @functools.cache
    def checkpoint(name: str) -> Path:
        return write_checkpoint(ARCHITECTURES[name], tmp_path_factory.mktemp("checkpoint"))

    def make(architecture: str, method: str) -> Pair:
        folder = tmp_path_factory.mktemp("pair")
        return Pair(ARCHITECTURES[architecture], method, checkpoint=checkpoint(architecture), folder=folder)

    return make


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrise `names` with the pairs to try, and `family` with the families."""
    every = metafunc.config.getoption("compatibility") != "some"
    if "family" in metafunc.fixturenames:
        metafunc.parametrize("family", [*families.FAMILIES, *families.PUBLISHED] if every else SAMPLE)
    if "names" in metafunc.fixturenames:
        pairs = [
            (architecture, method)
            for architecture in ARCHITECTURES
            for method in METHODS
            if every
            or method == "LoRA"
            or architecture == "Llama"
            or (architecture == "GPT-2" and "target_modules" in METHODS[method])
        ]
        metafunc.parametrize("names", pairs, ids=" × ".join)
