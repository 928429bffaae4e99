"""What benchmarks measure: models with random weights, providers of a model, and a tenant process that trains it and
generates with it."""

import copy
import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Final, Literal, NamedTuple, Self

import torch
from peft import LoraConfig, PeftConfig, get_peft_model
from safetensors.torch import save_file
from transformers import BertConfig, BertModel, LlamaConfig
from typer import Option

from symbiosis_priv.checkpoints.discovery.skeleton import build
from symbiosis_priv.checkpoints.layers import Scope
from symbiosis_priv.errors import ConfigError
from symbiosis_priv.harness.local import LocalFederation
from tenant.bench.processes import seconds_of
from tenant.cli.options import quiet
from tenant.masking.registry import session_scheme
from tenant.model.hf import RemoteConfig, backend_of
from tenant.model.ledger import ledger_of, since
from tenant.model.loading import load_model
from tenant.session.tally import Ledger
from tenant.session.traffic import Transport

HALF_THE_CORES = max(1, (os.cpu_count() or 1) // 2)
_START_S, _SETTLE_S = 900.0, 0.3  # providers quantise the model at their start

Repeat = Annotated[int, Option(min=1, help="Repetitions.")]
Threads = Annotated[int, Option(min=1, help="Torch threads of each process.")]
Width = Annotated[int, Option(min=64, help="Width of the model, an even number.")]
Layers = Annotated[int, Option(min=1, help="Layers of the model.")]
Inner = Annotated[int, Option(min=8, help="Width inside the MLP.")]


@dataclass(frozen=True, kw_only=True)
class Effort:
    """Repetitions and resources of a measurement."""

    repeat: Repeat = 3
    threads: Threads = HALF_THE_CORES


@dataclass(frozen=True, kw_only=True)
class Llama:
    """The shape of a Llama. `heads`: None for heads of 64 dimensions, or more if they do not divide the width.
    `key_heads`: None for a quarter of the query heads, or fewer if that does not divide them."""

    width: Width
    layers: Layers
    inner: Inner
    heads: int | None = None
    key_heads: int | None = None
    vocabulary: int = 4096  # small, because the head stays with the tenant
    tied: bool = True  # the head is the embedding

    def config(self) -> LlamaConfig:
        heads = self.heads or _heads(self.width)
        return LlamaConfig(
            hidden_size=self.width,
            intermediate_size=self.inner,
            num_hidden_layers=self.layers,
            num_attention_heads=heads,
            num_key_value_heads=self.key_heads or math.gcd(heads, max(1, heads // 4)),
            vocab_size=self.vocabulary,
            tie_word_embeddings=self.tied,
        )

    def save(self, folder: Path, **options: int) -> Path:
        """Write a checkpoint with random weights in bfloat16, a file per layer, and always the same. `options`: of the
        configuration. Returns the folder."""
        config = self.config()
        config.update(options)
        folder.mkdir(parents=True)
        config.save_pretrained(folder)
        files: dict[str, dict[str, tuple[int, ...]]] = {}
        for name, parameter in build(config).named_parameters():
            parts = name.split(".")
            files.setdefault(f"layer-{parts[2]}" if "layers" in parts else "rest", {})[name] = tuple(parameter.shape)
        index: dict[str, str] = {}
        for seed, (file, shapes) in enumerate(files.items()):
            drawn = torch.Generator().manual_seed(seed)
            tensors = {
                name: torch.ones(shape, dtype=torch.bfloat16, device="cpu")
                if len(shape) == 1
                else torch.empty(shape, dtype=torch.bfloat16, device="cpu").normal_(std=0.02, generator=drawn)
                for name, shape in shapes.items()
            }
            save_file(tensors, folder / f"{file}.safetensors", metadata={"format": "pt"})
            index |= dict.fromkeys(tensors, f"{file}.safetensors")
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
        return folder


LLAMAS: Final = {
    "llama-2-7b": Llama(width=4096, layers=32, inner=11008, heads=32, key_heads=32, vocabulary=32000, tied=False),
    "llama-3-8b": Llama(width=4096, layers=32, inner=14336, heads=32, key_heads=8, vocabulary=128256, tied=False),
}
"""The shapes of models of real size."""


def small_llama(width: int, *, inner: int) -> Llama:
    """The shape of a Llama with one layer, for benchmarks that use its groups without running it."""
    return Llama(width=width, layers=1, inner=inner, heads=1, key_heads=1, vocabulary=64)


@dataclass(frozen=True, kw_only=True)
class Bert:
    """The shape of a BERT; BERT-base by default."""

    width: Width = 768
    layers: Layers = 12
    inner: Inner = 3072

    def save(self, folder: Path) -> Path:
        """Write a checkpoint with random weights, always the same, and return its folder."""
        torch.manual_seed(0)
        config = BertConfig(
            hidden_size=self.width,
            num_hidden_layers=self.layers,
            intermediate_size=self.inner,
            num_attention_heads=_heads(self.width),
            vocab_size=30522 if self.width > 512 else 512,
        )
        BertModel(config).save_pretrained(folder)
        return folder


def _heads(width: int) -> int:
    return math.gcd(width // 2, max(1, width // 64))


def write_adapters(folder: Path, base: Any, configs: Mapping[str, PeftConfig]) -> None:
    """Write an adapter with random parameters, always the same, for each configuration."""
    torch.manual_seed(0)
    for name, config in configs.items():
        adapted: Any = get_peft_model(base, copy.copy(config))
        with torch.no_grad():
            for parameter in adapted.parameters():
                if parameter.requires_grad:
                    parameter.add_(torch.randn_like(parameter) * 0.01)
        adapted.save_pretrained(str(folder / name))
        base = adapted.unload()


class MaskingVariant(NamedTuple):
    """A masking scheme, and how matrices are sent. `name` is the option's value: `pad`, `pad/24` in a ring of 24 bits,
    `pad/two` with two round trips per block."""

    name: str
    scheme: str
    transport: Transport

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse a name. Raises `ConfigError` if no scheme with a session has it."""
        scheme, *flags = text.strip().split("/")
        session_scheme(scheme)
        if unknown := set(flags) - {"24", "two"}:
            raise ConfigError(f"{text!r}: {unknown.pop()!r} after a slash is neither 24 nor two")
        trips: Literal[2, 4] = 2 if "two" in flags else 4
        sent = Transport(ring_bits=24 if "24" in flags else 32, round_trips=trips)
        return cls(text.strip(), scheme, sent)


def parse_maskings(text: str) -> list[MaskingVariant]:
    return list(map(MaskingVariant.parse, text.split(",")))


def provide(
    model: Path, directory: Path, *, threads: int, maskings: Sequence[MaskingVariant] = (), **options: Any
) -> LocalFederation:
    """Return providers of a checkpoint, not yet started, which can do what the maskings need. Their files are in a
    subfolder of `directory`."""
    given: dict[str, Any] = {"provider_options": {"executor": {"threads": threads}}, "deadline_s": _START_S}
    given["scope"] = Scope(round_trips=2 if any(one.transport.round_trips == 2 for one in maskings) else 4)
    return LocalFederation(model, directory / "federation", **given | options)


def federation_of(local: LocalFederation, number: int) -> Path:
    """Issue a tenant's certificate, and return the path of its federation file."""
    local.issue_tenant(f"tenant-{number}")
    own = local.directory / f"tenant-{number}.toml"
    own.write_text(local.federation.read_text(encoding="utf-8").replace("/tenant.", f"/tenant-{number}."))
    return own


def remote_config(local: LocalFederation, masking: MaskingVariant, federation: Path | None = None) -> RemoteConfig:
    """Return the configuration of a tenant of these providers, with their federation file or another one."""
    where: dict[str, Any] = {"federation": federation or local.federation, "cache": local.cache}
    return RemoteConfig(masking=masking.scheme, **where, **vars(masking.transport))


class Lora(NamedTuple):
    """A LoRA: its rank, and the projections of attention that it adapts, by their letters: `qv`, `qkvo`."""

    rank: int = 8
    targets: str = "qv"


_LORA = Lora()


@dataclass(frozen=True, kw_only=True)
class Step:
    """Optimizer steps of a LoRA, which starts anew if the step before had another. `settled`: each waits for the pads
    that it has ordered, and counts their effects."""

    batch: int
    tokens: int
    steps: int = 1
    lora: Lora = _LORA
    settled: bool = False


@dataclass(frozen=True, kw_only=True)
class Generate:
    """Generate `tokens` tokens greedily after a prompt."""

    prompt: int
    tokens: int


@dataclass(frozen=True, kw_only=True)
class Products:
    """One forward and one backward product of `rows` rows with every linear of the layers, in float32 and by the whole
    model: those of a step that providers compute for a split model, and one more (the first layer's gradient)."""

    rows: int


Work = Step | Generate | Products


@dataclass(frozen=True, kw_only=True)
class Cost:
    """The cost of one step or one token. `counted`: the increase of the ledger; zeros for the whole model."""

    seconds: float
    counted: Ledger

    @property
    def moved_mib(self) -> float:
        """What was sent and received."""
        return float(sum(n for name, n in vars(self.counted).items() if name.startswith("bytes_"))) / 2**20


def counters(model: Any) -> Ledger:
    """Return the counters of a model's session; zeros without one, also for a whole model."""
    return (ledger_of(model) if hasattr(model, "hf_quantizer") else None) or Ledger()


class _Tenant:
    def __init__(self, model: Path, remote: RemoteConfig | None, dtype: torch.dtype | str) -> None:
        base = load_model(model, remote=remote, dtype=dtype)
        self.backend: AbstractContextManager[object] = nullcontext() if remote is None else backend_of(base)
        self._adapt(base, _LORA)

    def _adapt(self, base: Any, lora: Lora) -> None:
        targets = [f"{letter}_proj" for letter in lora.targets]
        config = LoraConfig(task_type="CAUSAL_LM", target_modules=targets, r=lora.rank)
        self._lora, self._model = lora, get_peft_model(base, config)
        self._optimizer = torch.optim.AdamW((p for p in self._model.parameters() if p.requires_grad), lr=1e-4)

    def do(self, work: Work) -> list[Cost]:
        if isinstance(work, Products):
            return [self._cost_of(partial(self._multiply, work.rows))]
        if isinstance(work, Step):
            if work.lora != self._lora:
                self._adapt(self._model.unload(), work.lora)
            self._model.train()
            step = partial(self._step, self._tokens(work.batch, work.tokens))
            return [self._cost_of(step, settled=work.settled) for _ in range(work.steps)]
        self._model.eval()
        with torch.no_grad():
            output = self._model(input_ids=self._tokens(1, work.prompt), use_cache=True)

            def next_token() -> None:
                nonlocal output
                latest, cache = output.logits[:, -1:].argmax(-1), output.past_key_values
                output = self._model(input_ids=latest, past_key_values=cache, use_cache=True)

            return [self._cost_of(next_token) for _ in range(work.tokens)]

    def _step(self, ids: torch.Tensor) -> None:
        self._model(input_ids=ids, labels=ids).loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()

    @torch.no_grad()
    def _multiply(self, rows: int) -> None:
        for name, module in self._model.named_modules():
            if type(module) is torch.nn.Linear and ".layers." in name and "lora" not in name:
                x = torch.ones((rows, module.in_features), dtype=torch.float32, device="cpu")
                (x @ module.weight.t()) @ module.weight

    def _cost_of(self, work: Callable[[], None], *, settled: bool = False) -> Cost:
        before = counters(self._model)
        cost = Cost(seconds=seconds_of(work), counted=since(before, counters(self._model)))
        while settled:
            time.sleep(_SETTLE_S)
            later = Cost(seconds=cost.seconds, counted=since(before, counters(self._model)))
            settled, cost = later.moved_mib > cost.moved_mib, later
        return cost

    def _tokens(self, rows: int, columns: int) -> torch.Tensor:
        return torch.randint(self._model.config.vocab_size, (rows, columns), dtype=torch.long, device="cpu")


@contextmanager
def serve_tenant(
    model: Path, remote: RemoteConfig | None, threads: int, dtype: torch.dtype | str = torch.float32, seed: int = 0
) -> Iterator[Callable[[Work], list[Cost]]]:
    """The work of a `Child`: the handler runs a task and returns the cost of each of its steps or tokens. `remote` says
    how to split the model; with None, this process holds the whole model. `seed`: of its adapter and data."""
    quiet()
    torch.set_num_threads(threads)
    torch.manual_seed(seed)
    tenant = _Tenant(model, remote, dtype)
    with tenant.backend:
        yield tenant.do
