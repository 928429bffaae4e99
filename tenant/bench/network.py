"""`bench network`: a model over slow links, as in table 3 of PETALS (arXiv 2312.08361). `bench bytes`: the bytes that a
tenant moves for a token and for a step of Llama-2-7B and Llama-3-8B, computed from the shapes (`session.traffic`).

The links are emulated (`link`), one for each tenant. A prompt is read before the link becomes slow, and its keys and
values are kept, so only the answer's tokens are timed. Answers are forced to continue a text that comes with Python:
guesses are then right as often as they are in that text, although the weights are random. Before every pass of the
offloaded model its files leave the page cache, as those of a model larger than memory do.
"""

import multiprocessing
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from functools import partial
from multiprocessing.forkserver import ensure_running
from pathlib import Path
from pydoc_data.topics import topics
from statistics import fmean
from typing import Annotated, Any, NamedTuple

import torch
import typer
from torch import Tensor
from transformers import AutoModelForCausalLM

from symbiosis_priv.arithmetic.ring import BACKWARD, FORWARD, Direction
from symbiosis_priv.checkpoints.discovery.skeleton import traced
from symbiosis_priv.checkpoints.layers import Scope
from symbiosis_priv.checkpoints.manifest import GroupEntry
from tenant.bench import measured_models as models
from tenant.bench.link import HOST, Condition, Link
from tenant.bench.many_requests import NoText, answer
from tenant.bench.options import Maskings, Progress, benchmark
from tenant.bench.processes import Child, ask_all, check_supported, seconds_of
from tenant.bench.report import Goal, Row, figure, where
from tenant.cli.options import quiet
from tenant.endpoint.engine.continuous import ContinuousEngine
from tenant.endpoint.engine.requests import AHEAD, EngineRequest, Sampling
from tenant.endpoint.engine.single_model import open_packed
from tenant.model.hf import RemoteConfig, backend_of
from tenant.model.loading import load_language_model
from tenant.session.traffic import PredictedTraffic, of_pass

_LENGTHS, _BATCHES, _FORWARD_TOKENS = (128, 2048), (1, 64), 8
_FIGURES = ("length_128_per_s", "length_2048_per_s", "tokens_per_pass", "batch_1_per_s", "batch_64_per_s")
_TENANTS, _WARM_UP, _TURN_S = 8, 3, 900.0
_PAD, _FEWER = models.MaskingVariant.parse("pad"), models.MaskingVariant.parse("pad/two")
_ALONE, _EIGHT = "split", "split, one of all tenants"
_GUESSED, _OFFLOADED = "split, two round trips and --draft prompt", "offloaded to disk"
_SHAPE = models.Llama(width=2048, layers=4, inner=5632)


class Answer(NamedTuple):
    """Tokens after the first one of an answer to a prompt of this length."""

    length: int
    tokens: int


class Forward(NamedTuple):
    """A forward pass of a batch of sequences."""

    batch: int


class Rate(NamedTuple):
    """Tokens or passes per second, and the tokens of a pass."""

    per_s: float
    per_pass: float = 1.0


Work = Answer | Forward
Tenant = Child[Work, Rate]


def network_goals(rows: Sequence[Row]) -> Iterator[Goal]:
    """The faster of the two ways over each link, and eight tenants."""
    [offloaded], [eight] = where(rows, way=_OFFLOADED), where(rows, way=_EIGHT)
    short, long, _, *batches = _FIGURES
    for row in where(rows, way=_ALONE):
        [guessed] = where(rows, way=_GUESSED, condition=row["condition"])
        for name in (short, long, *batches):
            over = max(float(way[name] or 0) for way in (row, guessed)) / figure(offloaded, name)
            what = name.removesuffix("_per_s").replace("_", " ")
            yield Goal(f"rate, {what}, over offloading's, {row['condition']}", over, at_least=1)
    [alone] = where(rows, way=_ALONE, condition=eight["condition"])
    over = figure(alone, short) / figure(eight, short)
    yield Goal(f"a token of {_TENANTS} tenants over one alone's, {eight['condition']}", over, at_most=1.2)


@benchmark("network", goals=network_goals)
def network(
    folder: Path,
    progress: Progress,
    *,
    condition: Annotated[
        str, typer.Option(help="Bandwidth and round trip, like 100mbit/100ms; several separated by commas.")
    ] = "1gbit/5ms,100mbit/5ms,100mbit/100ms",
    shape: models.Llama = _SHAPE,
    tokens: Annotated[int, typer.Option(min=2, help="Generated tokens of each answer.")] = 16,
) -> Iterator[Row]:
    """Generate and read texts over a slow network, alone and beside other tenants, and with the same model offloaded
    to this machine's disk."""
    check_supported()
    multiprocessing.set_forkserver_preload([__name__])  # otherwise each tenant imports torch
    ensure_running()
    conditions, threads = [Condition.parse(text) for text in condition.split(",")], models.HALF_THE_CORES
    model = shape.save(folder / "model", max_position_embeddings=2 * max(_LENGTHS))
    with ExitStack() as stack:
        progress("starting providers")
        links = [stack.enter_context(Link()) for _ in range(_TENANTS)]
        providers = models.provide(model, folder, threads=threads, maskings=[_PAD, _FEWER], host=HOST)
        local = stack.enter_context(providers)

        def start(number: int, link: Link, masking: models.MaskingVariant) -> Tenant:
            federation = link.federation(models.federation_of(local, number))
            remote = models.remote_config(local, masking, federation)
            return stack.enter_context(Child(f"tenant {number}", serve_split, model, remote, threads))

        tenants = [start(number, link, _PAD) for number, link in enumerate(links)]
        ways = {_ALONE: tenants[0], _GUESSED: start(_TENANTS, links[0], _FEWER)}
        progress("reading prompts")
        for tenant in ways.values():
            for length in _LENGTHS:
                tenant.ask(Answer(length, _WARM_UP), timeout_s=_TURN_S)
        ask_all(tenants[1:], Answer(_LENGTHS[0], _WARM_UP), timeout_s=_TURN_S)
        shared: Row = {"width": shape.width, "layers": shape.layers}
        for state in conditions:
            links[0].apply(state)
            for way, tenant in ways.items():
                progress(f"{state}: {way}")
                yield shared | {"way": way, "condition": str(state)} | _measured(tenant, tokens, way != _GUESSED)
        for link in links:
            link.apply(conditions[-1])
        progress(f"{conditions[-1]}: {_TENANTS} tenants")
        rates = ask_all(tenants, Answer(_LENGTHS[0], tokens), timeout_s=_TURN_S)
        row = shared | {"way": _EIGHT, "condition": str(conditions[-1])}
        yield row | dict.fromkeys(_FIGURES) | {_FIGURES[0]: fmean(rate.per_s for rate in rates)}
    progress(_OFFLOADED)
    with Child("offloading", serve_offloaded, model, folder / "offloaded") as offloading:
        yield shared | {"way": _OFFLOADED, "condition": None} | _measured(offloading, _WARM_UP, batches=True)


def _measured(tenant: Tenant, tokens: int, batches: bool) -> Row:
    """Tokens per second by length of the prompt, and forward passes per second by size of the batch."""
    answers = [tenant.ask(Answer(length, tokens), timeout_s=_TURN_S) for length in _LENGTHS]
    passes = [tenant.ask(Forward(batch), timeout_s=_TURN_S).per_s if batches else None for batch in _BATCHES]
    figures = [*(rate.per_s for rate in answers), fmean(rate.per_pass for rate in answers), *passes]
    return dict(zip(_FIGURES, figures, strict=True))


@contextmanager
def serve_split(model: Path, remote: RemoteConfig, threads: int) -> Iterator[Callable[[Work], Rate]]:
    """The work of a `Child`: a tenant. With two round trips, it also guesses tokens."""
    quiet()
    torch.set_num_threads(threads)
    split = load_language_model(model, remote=remote, dtype=torch.float32)
    ahead = AHEAD if remote.round_trips == 2 else 0
    engine = ContinuousEngine(open_packed(split), NoText(), ahead=ahead)  # type: ignore[arg-type]
    text = _text(split.config.vocab_size)

    def do(work: Work) -> Rate:
        if isinstance(work, Forward):
            return _forward(split, text, work.batch)
        forced = Sampling(grammar=partial(_Forced, text[work.length :], split.config.vocab_size))
        prompt = tuple(text[: work.length])
        before = engine.load().steps
        [times] = answer(engine, [EngineRequest(id="0", prompt=prompt, max_tokens=work.tokens, sampling=forced)])
        passes = engine.load().steps - before - 1  # the first token comes with the prompt's last one
        return Rate((len(times) - 1) / (times[-1] - times[0]), (len(times) - 1) / passes)

    with closing(backend_of(split)):
        yield do
        engine.close()


@contextmanager
def serve_offloaded(model: Path, folder: Path) -> Iterator[Callable[[Work], Rate]]:
    """The work of a `Child`: a model whose layers stay on disk, with all cores."""
    quiet()
    offloaded: Any = AutoModelForCausalLM.from_pretrained(
        model, dtype="auto", device_map={"": "disk"}, offload_folder=folder, trust_remote_code=False
    ).eval()
    text = _text(offloaded.config.vocab_size)

    def do(work: Work) -> Rate:
        forget = partial(_forget, model)
        if isinstance(work, Forward):
            return _forward(offloaded, text, work.batch, before=forget)
        ids, seconds = torch.tensor([text[: work.length]], dtype=torch.long, device="cpu"), []
        cache = None
        for _ in range(1 + work.tokens):
            forget()
            began = time.perf_counter()
            with torch.no_grad():
                output = offloaded(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
            seconds.append(time.perf_counter() - began)
            ids, cache = output.logits[:, -1:].argmax(-1), output.past_key_values
        return Rate(work.tokens / sum(seconds[1:]))

    yield do


def _forward(model: Any, text: Sequence[int], batch: int, *, before: Callable[[], None] = lambda: None) -> Rate:
    size = _FORWARD_TOKENS * batch
    ids: Tensor = torch.tensor(text[:size], dtype=torch.long, device="cpu").view(batch, _FORWARD_TOKENS)
    before()
    with torch.no_grad():
        return Rate(1 / seconds_of(partial(model, input_ids=ids, use_cache=False)))


def _forget(model: Path) -> None:
    """Drop the checkpoint's pages from the page cache."""
    for file in model.glob("*.safetensors"):
        with file.open("rb") as opened:
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _text(vocabulary: int) -> list[int]:
    """Words of Python's manual as token ids; equal words have equal ids."""
    words = re.findall(r" ?\w+|\s+|[^\w\s]", "".join(topics.values()))[: 4 * max(_LENGTHS)]
    ids = {word: number % vocabulary for number, word in enumerate(dict.fromkeys(words))}
    return [ids[word] for word in words]


class _Forced:
    """A `Grammar` that allows one text."""

    def __init__(self, text: Sequence[int], vocabulary: int) -> None:
        self._text, self._size, self._done = text, -(-vocabulary // 8), 0

    def allowed(self) -> bytes:
        bits, token = bytearray(self._size), self._text[self._done]
        bits[token // 8] = 1 << token % 8
        return bytes(bits)

    def accept(self, token: int) -> bool:
        self._done += 1
        return False


@benchmark("bytes")
def bytes_(folder: Path, progress: Progress, *, masking: Maskings = "pad,pad/24,pad/two") -> Iterator[Row]:
    """Compute the bytes that a tenant moves for a token and a step of Llama-2-7B and Llama-3-8B."""
    maskings = models.parse_maskings(masking)
    works: list[tuple[str, int, list[Direction]]] = [
        ("token", 1, [FORWARD]),
        ("step of 512 tokens", 512, [FORWARD, BACKWARD]),
    ]
    for model, shape in models.LLAMAS.items():
        config = replace(shape, layers=2).config()
        config.architectures = ["LlamaForCausalLM"]
        found = traced(config, Scope(round_trips=2)).groups
        blocks = [[group for group in found if f".{block}." in group.members[0]] for block in (0, 1)]
        specs = [*blocks[0] * (shape.layers - 1), *blocks[1]]
        groups = [GroupEntry(digest="", **vars(group)) for group in specs]
        ordinary = [group for group in groups if group.composed is None]
        for work, rows, directions in works:
            plain = sum(2 * rows * sum(group.columns(d)) for d in directions for group in ordinary[d == BACKWARD :])
            first = None
            for variant in maskings:
                traffic = sum((of_pass(groups, d, rows, variant.transport) for d in directions), PredictedTraffic())
                moved = traffic.up + traffic.down + traffic.effects
                first = first or moved
                yield {
                    "model": model,
                    "work": work,
                    "masking": variant.name,
                    "up_mb": traffic.up / 1e6,
                    "down_mb": traffic.down / 1e6,
                    "effects_mb": traffic.effects / 1e6,
                    "moved_mb": moved / 1e6,
                    "over_first_masking": moved / first,
                    "over_float16_unmasked": moved / plain,
                }
