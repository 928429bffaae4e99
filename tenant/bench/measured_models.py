"""What benchmarks measure: models with random weights, providers of a model, and a tenant process that trains it and
generates with it."""

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Final, Literal, NamedTuple, Self

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, BertConfig, BertModel, LlamaConfig
from typer import Option

from symbiosis_priv.checkpoints.layers import Scope
from symbiosis_priv.errors import ConfigError
from symbiosis_priv.harness.local import LocalFederation
from tenant.cli.options import quiet
from tenant.masking.registry import session_scheme
from tenant.model.hf import RemoteConfig, backend_of
from tenant.model.ledger import ledger_of, since
from tenant.model.loading import load_model
from tenant.session.tally import Ledger
from tenant.session.traffic import Transport

_VOCABULARY, _SMALL_VOCABULARY, _SMALL = 30522, 512, 512
HEAD = 64
"""Dimensions of an attention head; widths are multiples of it, unless `heads` is given."""
HALF_THE_CORES = max(1, (os.cpu_count() or 1) // 2)
START_S = 900.0  # providers quantise the model at their start

Repeat = Annotated[int, Option(min=1, help="Repetitions.")]
Width = Annotated[int, Option(min=HEAD, help=f"Width of the model, a multiple of {HEAD}.")]
Layers = Annotated[int, Option(min=1, help="Layers of the model.")]
Inner = Annotated[int, Option(min=8, help="Width inside the MLP.")]


@dataclass(frozen=True, kw_only=True)
class Effort:
    """Repetitions and resources of a measurement."""

    repeat: Repeat = 3
    threads: Annotated[int, Option(min=1, help="Torch threads of each process.")] = HALF_THE_CORES


@dataclass(frozen=True, kw_only=True)
class Llama:
    """The shape of a Llama. Raises `ConfigError` if the width is not a multiple of `HEAD` and `heads` is None, which
    stands for `width / HEAD`. `key_heads`: None for the divisor of the query heads that is nearest to a quarter of
    them."""

    width: Width
    layers: Layers
    inner: Inner
    heads: int | None = None
    key_heads: int | None = None
    vocabulary: int = 4096  # small, because the head stays with the tenant
    tied: bool = True  # the head is the embedding

    def __post_init__(self) -> None:
        if self.heads is None:
            check_width(self.width)

    def config(self) -> LlamaConfig:
        """Return the configuration."""
        heads = self.heads or max(1, self.width // HEAD)
        divisors = (number for number in range(1, heads + 1) if not heads % number)
        return LlamaConfig(
            hidden_size=self.width,
            intermediate_size=self.inner,
            num_hidden_layers=self.layers,
            num_attention_heads=heads,
            num_key_value_heads=self.key_heads or min(divisors, key=lambda number: abs(number - heads / 4)),
            vocab_size=self.vocabulary,
            tie_word_embeddings=self.tied,
        )

    def save(self, folder: Path) -> Path:
        """Write a checkpoint with random weights, always the same, and return its folder."""
        torch.manual_seed(0)
        model: Any = AutoModelForCausalLM.from_config(self.config(), dtype=torch.float32)
        model.save_pretrained(folder)
        return folder


LLAMAS: Final = {
    "llama-2-7b": Llama(width=4096, layers=32, inner=11008, heads=32, key_heads=32, vocabulary=32000, tied=False),
    "llama-3-8b": Llama(width=4096, layers=32, inner=14336, heads=32, key_heads=8, vocabulary=128256, tied=False),
}
"""The shapes of models of real size."""


def small_llama(width: int, *, inner: int, layers: int = 1) -> Llama:
    """The shape of a Llama with four heads, for benchmarks that use its layer groups without running it."""
    return Llama(width=width, layers=layers, inner=inner, heads=4, key_heads=4, vocabulary=64)


@dataclass(frozen=True, kw_only=True)
class Bert:
    """The shape of a BERT; BERT-base by default. Raises `ConfigError` if the width is not a multiple of `HEAD`."""

    width: Width = 768
    layers: Layers = 12
    inner: Inner = 3072

    def __post_init__(self) -> None:
        check_width(self.width)

    def save(self, folder: Path) -> Path:
        """Write a checkpoint with random weights, always the same, and return its folder."""
        torch.manual_seed(0)
        config = BertConfig(
            hidden_size=self.width,
            num_hidden_layers=self.layers,
            intermediate_size=self.inner,
            num_attention_heads=self.width // HEAD,
            vocab_size=_VOCABULARY if self.width > _SMALL else _SMALL_VOCABULARY,
        )
        BertModel(config).save_pretrained(folder)
        return folder


def check_width(width: int) -> None:
    """Raise `ConfigError` unless a width is a multiple of `HEAD`."""
    if width % HEAD:
        raise ConfigError(f"--width {width}: write multiples of {HEAD}, the dimensions of an attention head")


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
    given: dict[str, Any] = {"provider_options": {"executor": {"threads": threads}}, "deadline_s": START_S}
    given["scope"] = Scope(round_trips=2 if any(one.transport.round_trips == 2 for one in maskings) else 4)
    return LocalFederation(model, directory / "federation", **given | options)


def federation_of(local: LocalFederation, number: int) -> Path:
    """Issue a tenant's certificate, and return the path of its federation file."""
    local.issue_tenant(f"tenant-{number}")
    own = local.directory / f"tenant-{number}.toml"
    own.write_text(local.federation.read_text(encoding="utf-8").replace("/tenant.", f"/tenant-{number}."))
    return own


def remote_config(
    local: LocalFederation, masking: MaskingVariant, effort: Effort, *, federation: Path | None = None
) -> RemoteConfig:
    """Return the configuration of a tenant of these providers, with their federation file or another one."""
    transport = masking.transport
    return RemoteConfig(
        federation=federation or local.federation,
        masking=masking.scheme,
        ring_bits=transport.ring_bits,
        round_trips=transport.round_trips,
        cache=local.cache,
    )


class Lora(NamedTuple):
    """A LoRA: its rank, and the projections of attention that it adapts, by their letters: `qv`, `qkvo`."""

    rank: int = 8
    targets: str = "qv"


LORA = Lora()


@dataclass(frozen=True, kw_only=True)
class Step:
    """Optimizer steps of a LoRA, which starts anew if the step before had another."""

    batch: int
    tokens: int
    steps: int = 1
    lora: Lora = LORA


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


Task = Step | Generate
Work = Task | Products


@dataclass(frozen=True, kw_only=True)
class Cost:
    """The cost of one step or one token. `counted`: the increase of the ledger; empty for the whole model."""

    seconds: float
    counted: dict[str, float]


class _Tenant:
    def __init__(self, model: Path, remote: RemoteConfig | None, dtype: torch.dtype | str, seed: int) -> None:
        torch.manual_seed(seed)
        base = load_model(model, remote=remote, dtype=dtype)
        self._backend = None if remote is None else backend_of(base)
        self._adapt(base, LORA)

    def _adapt(self, base: Any, lora: Lora) -> None:
        targets = [f"{letter}_proj" for letter in lora.targets]
        config = LoraConfig(task_type="CAUSAL_LM", target_modules=targets, r=lora.rank)
        self._lora, self._model = lora, get_peft_model(base, config)
        self._optimizer = torch.optim.AdamW((p for p in self._model.parameters() if p.requires_grad), lr=1e-4)

    def do(self, task: Work) -> list[Cost]:
        if isinstance(task, Step):
            if task.lora != self._lora:
                self._adapt(self._model.unload(), task.lora)
            self._model.train()

            def step(ids: torch.Tensor) -> None:
                self._model(input_ids=ids, labels=ids).loss.backward()
                self._optimizer.step()
                self._optimizer.zero_grad()

            return [self._cost_of(partial(step, self._tokens(task.batch, task.tokens))) for _ in range(task.steps)]
        if isinstance(task, Products):
            return [self._cost_of(partial(self._multiply, task.rows))]
        self._model.eval()
        with torch.no_grad():
            output = self._model(input_ids=self._tokens(1, task.prompt), use_cache=True)

            def next_token() -> None:
                nonlocal output
                latest, cache = output.logits[:, -1:].argmax(-1), output.past_key_values
                output = self._model(input_ids=latest, past_key_values=cache, use_cache=True)

            return [self._cost_of(next_token) for _ in range(task.tokens)]

    def _multiply(self, rows: int) -> None:
        with torch.no_grad():
            for name, module in self._model.named_modules():
                if type(module) is torch.nn.Linear and ".layers." in name and "lora" not in name:
                    x = torch.ones((rows, module.in_features), dtype=torch.float32, device="cpu")
                    (x @ module.weight.t()) @ module.weight

    def _cost_of(self, work: Callable[[], None]) -> Cost:
        before = self._ledger()
        start = time.perf_counter()
        work()
        seconds = time.perf_counter() - start
        counted = since(before, self._ledger())
        numbers = {name: value for name, value in asdict(counted).items() if isinstance(value, int | float)}
        return Cost(seconds=seconds, counted=numbers)

    def _ledger(self) -> Ledger:
        return Ledger() if self._backend is None else ledger_of(self._model) or Ledger()

    def _tokens(self, rows: int, columns: int) -> torch.Tensor:
        return torch.randint(self._model.config.vocab_size, (rows, columns), dtype=torch.long, device="cpu")

    def close(self) -> None:
        if self._backend is not None:
            self._backend.close()


@contextmanager
def serve_tenant(
    model: Path, remote: RemoteConfig | None, threads: int, dtype: torch.dtype | str = torch.float32, seed: int = 0
) -> Iterator[Callable[[Work], list[Cost]]]:
    """The work of a `Child`: the handler runs a task and returns the cost of each of its steps or tokens. `remote` says
    how to split the model; with None, this process holds the whole model. `seed`: of
    its adapter and data."""
    quiet()
    torch.set_num_threads(threads)
    with contextlib.closing(_Tenant(model, remote, dtype, seed)) as tenant:
        yield tenant.do
