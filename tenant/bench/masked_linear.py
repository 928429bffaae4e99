"""`bench linear`: where the time of one masked, verified linear goes.

Every repetition measures each quantity once, so that other work on the machine affects all quantities alike. "masked"
is a call whose pads, and those of the next one, were drawn ahead. Its parts are those of `tenant.session.tally`;
"network + product" is the exchange with the executor. "product" is the same product here, "float32" that of the weights
in float32. "pad" is the time to draw a pad and its effects.
"""

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated

import torch
import typer

from symbiosis_priv.arithmetic.ring import FORWARD
from symbiosis_priv.checkpoints.weights import WeightStore
from symbiosis_priv.errors import DeadlineExceededError
from symbiosis_priv.federation import load_federation
from symbiosis_priv.kernels import probe_rows
from symbiosis_priv.limits import DEFAULT_HINT_BITS, GroupIndex
from tenant.bench.measured_models import HALF_THE_CORES, Llama, MaskingVariant, Repeat, Threads, provide
from tenant.bench.options import Masking, Progress, Rows, benchmark, numbers
from tenant.bench.processes import seconds_of
from tenant.bench.report import Goal, Row, figure, percentile
from tenant.core.pads import PadOrder
from tenant.masking.backend import RingBackend
from tenant.masking.registry import session_scheme
from tenant.model.ledger import since
from tenant.options import SessionOptions
from tenant.preparation.keys import prepare
from tenant.session.session import Session
from tenant.session.tally import SPANS, recorded

_WARM_UP = 3
_PREFETCH_DEADLINE_S, _NAP_S = 60.0, 2e-4


def goals(rows: Sequence[Row]) -> Iterator[Goal]:
    for row in rows:
        if figure(row, "width") >= 2048:
            what = f"a masked linear over its exchange, width {row['width']}, rows {row['rows']}"
            yield Goal(what, figure(row, "masked_over_exchange"), at_most=1.3)


@benchmark("linear", goals=goals)
def linear(
    folder: Path,
    progress: Progress,
    *,
    rows: Rows = "1,16,64,256",
    width: Annotated[str, typer.Option(help="Widths of the layer, separated by commas.")] = "768,2048",
    masking: Masking = "pad",
    repeat: Repeat = 50,
    threads: Threads = HALF_THE_CORES,
) -> Iterator[Row]:
    """Time one masked, verified linear and its parts, whose pads were drawn before the clock starts."""
    counts, sizes, variant = numbers(rows, "--rows"), numbers(width, "--width"), MaskingVariant.parse(masking)
    torch.set_num_threads(threads)
    for size in sizes:
        # the output projection is `size` x `size`, and the other layers are small
        shape = Llama(width=size, layers=1, inner=64, key_heads=1, vocabulary=64)
        model = shape.save(folder / str(size) / "model")
        with provide(model, model.parent, threads=threads, maskings=[variant]) as local:
            federation = load_federation(local.federation)
            store = WeightStore(model, cache=local.cache)
            preparation = prepare(store, digest=federation.model_digest, cache=local.cache)
            scheme, ring_bits = session_scheme(variant.scheme), variant.transport.ring_bits
            scheme.prepare(preparation, store, bits=DEFAULT_HINT_BITS, training=False)
            options = SessionOptions(masking=scheme.name, ring_bits=ring_bits)
            session = Session(federation, preparation, options=options, store=store)
            with contextlib.closing(RingBackend(scheme.facts(preparation, ring_bits), session)) as backend:
                for count in counts:
                    figures = _measured(session, backend, store, rows=count, repeat=repeat)
                    yield {"width": size, "masking": variant.name, "rows": count, **figures}


def _measured(session: Session, backend: RingBackend, store: WeightStore, *, rows: int, repeat: int) -> Row:
    index = next(i for i, facts in enumerate(backend.facts) if facts.entry.members[0].endswith("o_proj"))
    width = backend.facts[index].entry.inputs
    x = torch.randn(rows, width, dtype=torch.float32, device="cpu")
    call = partial(backend.linear, index, FORWARD, x)
    weight = torch.cat([layer.weight.to(torch.float32) for layer in store.layers(index)])
    plain = partial(torch.nn.functional.linear, x, weight)
    error = float((call() - plain()).norm() / plain().norm())  # the call makes the connection, which is not counted
    before = session.ledger()
    call()
    moved = since(before, session.ledger())

    def draw() -> None:
        """Draw a pad, if the scheme has pads, and wait for its effects."""
        if session.runtime.pads.source is not None:
            for share in session.runtime.pads.draw(PadOrder(GroupIndex(index), FORWARD, rows)).shares:
                share.effect.result()

    timed: dict[str, Callable[[], object]] = {
        "product": partial(store.matrix(index).product, probe_rows(rows, width)),
        "float32": plain,
        "pad": draw,
    }
    seconds: dict[str, list[float]] = {name: [] for name in (*timed, "masked", *SPANS)}
    for _ in range(_WARM_UP + repeat):
        for name, run in timed.items():
            seconds[name].append(seconds_of(run))
        # wait for the pads of the next two calls, if the scheme has pads, so that none are drawn meanwhile
        session.runtime.pads.order(GroupIndex(index), FORWARD, 2 * rows)
        until = time.monotonic() + _PREFETCH_DEADLINE_S
        while (ledger := session.ledger()).pads_taken and ledger.pads_ready < 2 * rows:
            if time.monotonic() > until:
                raise DeadlineExceededError(f"no pads for {2 * rows} rows within {_PREFETCH_DEADLINE_S:g} s")
            time.sleep(_NAP_S)
        with recorded() as spent:
            seconds["masked"].append(seconds_of(call))
        for span in SPANS:
            seconds[span].append(spent.get(span, 0.0))
    p50, p99 = ({name: percentile(seconds[name][_WARM_UP:], q, unit=1e-6) for name in seconds} for q in (50, 99))
    return {
        "bytes_both_ways": moved.bytes_to_executors + moved.bytes_from_executors,
        **{f"{name}_p50_us": p50[name] for name in (*timed, "masked")},
        "masked_p99_us": p99["masked"],
        **{f"{span}_us": p50[span] for span in SPANS},
        "relative_error": error,
        "masked_over_exchange": p50["masked"] / p50["network + product"],
    }
