"""`bench linear`: times a masked linear, a bare TLS echo of the same bytes, and the bare product.

Every repetition measures each quantity once, so that other work on the machine affects all quantities alike. "masked"
is a call whose pads were drawn ahead: the clock starts when the pool has pads for this call and the next, so that no
pads are made on the same cores meanwhile. During that wait the cores sleep and the caches lose the weights. So "rested
floor" follows a wait like that of the turn before: one exchange with the echo server, which multiplies between reading
and answering with its own copy of the weights, as an executor does. "echo" and "product" follow one another without a
wait, in two processes; their sum is the warm floor, the stricter of the two. "back to back" is a call that directly
follows another one, while the helper makes pads for the next call; it is divided by the warm floor. Such calls are
measured after the other quantities. "pad" is the time to draw a pad and its effects, which is otherwise spent ahead;
"float32" is the same linear with the weights here.
"""

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated

import torch
import typer

from symbiosis_priv.arithmetic.ring import FORWARD
from symbiosis_priv.checkpoints.weights import WeightStore
from symbiosis_priv.errors import ConnectionLostError, DeadlineExceededError
from symbiosis_priv.federation import Federation, Peer, load_federation
from symbiosis_priv.kernels import probe_rows
from symbiosis_priv.limits import DEFAULT_HINT_BITS, GroupIndex
from symbiosis_priv.network.tls import check_pin, server_context
from tenant.bench.measured_models import HALF_THE_CORES, HEAD, Llama, MaskingVariant, Repeat, provide
from tenant.bench.options import Masking, Progress, Rows, Threads, benchmark, numbers, widths
from tenant.bench.processes import Child
from tenant.bench.report import Goal, Row, figure, percentile
from tenant.core.pads import PadOrder
from tenant.masking.backend import RingBackend
from tenant.masking.registry import session_scheme
from tenant.options import SessionOptions
from tenant.preparation.keys import prepare
from tenant.session.session import Session
from tenant.session.supply import Supply
from tenant.session.tally import SPANS, recorded

_WARM_UP = 3
_PREFETCH_DEADLINE_S, _ECHO_S, _NAP_S = 60.0, 60.0, 2e-4
_HEADER = struct.Struct("<IIIII")  # bytes up, bytes down, repetitions, layer group, rows
_RATIOS = ("masked_over_floor", "masked_over_rested_floor", "back_to_back_over_floor")


def goals(rows: Sequence[Row]) -> Iterator[Goal]:
    for row in rows:
        if figure(row, "width") >= 2048:
            for ratio in _RATIOS:
                what = f"{ratio.replace('_', ' ')} of a linear, width {row['width']}, rows {row['rows']}"
                yield Goal(what, figure(row, ratio), at_most=1.3)


@benchmark("linear", goals=goals)
def linear(
    folder: Path,
    progress: Progress,
    *,
    rows: Rows = "1,16,64,256",
    width: Annotated[str, typer.Option(help="Widths of the layer, separated by commas; multiples of 64.")] = "768,2048",
    masking: Masking = "pad",
    repeat: Repeat = 50,
    threads: Threads = HALF_THE_CORES,
) -> Iterator[Row]:
    """Time one masked, verified linear and its parts, a bare TLS echo of the same bytes, and the bare product.

    Pads are drawn before the clock starts. "rested floor" is an exchange and product in another process, after a wait
    like that for pads. "back to back" is a call with the pads that were drawn during the call before.

    Example: symbiosis-priv bench linear --rows 1,256 --width 2048
    """
    counts, sizes, variant = numbers(rows, "--rows"), widths(width), MaskingVariant.parse(masking)
    torch.set_num_threads(threads)
    for size in sizes:
        # the output projection is `size` x `size`, and the other layers are small
        shape = Llama(width=size, layers=1, inner=HEAD, key_heads=1, vocabulary=64)
        model = shape.save(folder / str(size) / "model")
        with provide(model, model.parent, threads=threads, maskings=[variant]) as local:
            federation = load_federation(local.federation)
            executor = federation.executors[0]
            assert isinstance(executor.certificate, Path), "LocalFederation writes files"
            store = WeightStore(model, cache=local.cache)
            preparation = prepare(store, digest=federation.model_digest, cache=local.cache)
            key, authority = executor.certificate.with_suffix(".key"), local.directory / "keys" / "authority.pem"
            scheme, ring_bits = session_scheme(variant.scheme), variant.transport.ring_bits
            scheme.prepare(preparation, store, bits=DEFAULT_HINT_BITS, training=False)
            options = SessionOptions(masking=scheme.name, ring_bits=ring_bits)
            session = Session(federation, preparation, options=options, store=store)
            backend = RingBackend(scheme.facts(preparation, ring_bits), session)
            served = executor.certificate, key, authority, model, local.cache, threads
            with contextlib.closing(backend), Child("echo", serve_echo, *served) as echo:
                connect = partial(echo_connection, federation, executor, port=echo.ask(None, timeout_s=_ECHO_S))
                for count in counts:
                    figures = _measured(session, backend, store, connect, rows=count, repeat=repeat)
                    yield {"width": size, "masking": variant.name, "rows": count, **figures}


def _measured(
    session: Session,
    backend: RingBackend,
    store: WeightStore,
    connect: Callable[..., AbstractContextManager[Callable[[bool], None]]],
    *,
    rows: int,
    repeat: int,
) -> Row:
    index = next(i for i, facts in enumerate(backend.facts) if facts.entry.members[0].endswith("o_proj"))
    width = backend.facts[index].entry.inputs
    x = torch.randn(rows, width, dtype=torch.float32, device="cpu")
    xq, matrix = probe_rows(rows, width), store.matrix(index)
    call = partial(backend.linear, index, FORWARD, x)
    weight = torch.cat([layer.weight.to(torch.float32) for layer in store.layers(index)])
    plain = partial(torch.nn.functional.linear, x, weight)
    error = float((call() - plain()).norm() / plain().norm())  # the call makes the connection, which is not counted
    before = session.ledger()
    call()
    after = session.ledger()
    up = after.bytes_to_executors - before.bytes_to_executors  # of one request
    down = after.bytes_from_executors - before.bytes_from_executors
    names: tuple[str, ...] = ("echo", "product", "float32", "pad", "masked", "rested floor", "back to back", *SPANS)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    turns = _WARM_UP + repeat
    with connect(up=up, down=down, repetitions=2 * turns, index=index, rows=rows) as exchange:
        waited = 0.0
        for _ in range(turns):
            seconds["echo"].append(_seconds(partial(exchange, False)))
            seconds["product"].append(_seconds(partial(matrix.product, xq)))
            seconds["float32"].append(_seconds(plain))
            seconds["pad"].append(_seconds(partial(_draw, session.runtime.pads, GroupIndex(index), rows)))
            time.sleep(waited)
            seconds["rested floor"].append(_seconds(partial(exchange, True)))
            # wait for the pads of the next two calls, if the scheme has pads, so that none are drawn meanwhile
            session.runtime.pads.order(GroupIndex(index), FORWARD, 2 * rows)
            began = time.monotonic()
            while (ledger := session.ledger()).pads_taken and ledger.pads_ready < 2 * rows:
                if time.monotonic() > began + _PREFETCH_DEADLINE_S:
                    raise DeadlineExceededError(f"no pads for {2 * rows} rows within {_PREFETCH_DEADLINE_S:g} s")
                time.sleep(_NAP_S)
            waited = time.monotonic() - began
            with recorded() as spent:
                seconds["masked"].append(_seconds(call))
            for span in SPANS:
                seconds[span].append(spent.get(span, 0.0))
    seconds["back to back"] = [_seconds(call) for _ in range(turns)]
    p50, p99 = ({name: percentile(seconds[name][_WARM_UP:], q, unit=1e-6) for name in names} for q in (50, 99))
    return {
        "bytes_both_ways": up + down,
        "echo_p50_us": p50["echo"],
        "echo_p99_us": p99["echo"],
        "product_p50_us": p50["product"],
        "float32_p50_us": p50["float32"],
        "pad_p50_us": p50["pad"],
        "masked_p50_us": p50["masked"],
        "masked_p99_us": p99["masked"],
        "rested_floor_p50_us": p50["rested floor"],
        "back_to_back_p50_us": p50["back to back"],
        **{f"{span}_us": p50[span] for span in SPANS},
        "relative_error": error,
        "masked_over_echo": p50["masked"] / p50["echo"],
        "masked_over_floor": p50["masked"] / (p50["echo"] + p50["product"]),
        "masked_over_rested_floor": p50["masked"] / p50["rested floor"],
        "back_to_back_over_floor": p50["back to back"] / (p50["echo"] + p50["product"]),
    }


def _draw(pads: Supply, index: GroupIndex, rows: int) -> None:
    """Draw a pad, if the scheme has pads, and wait for its effects."""
    if pads.source is not None:
        for share in pads.draw(PadOrder(index, FORWARD, rows)).shares:
            share.effect.result()


def _seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


@contextmanager
def serve_echo(
    certificate: Path, key: Path, tenant_authority: Path, model: Path, cache: Path, threads: int
) -> Iterator[Callable[[None], int]]:
    """The work of a `Child`: an echo server for one connection at a time, which multiplies by weights of the model for
    requests whose first byte is not 0. The handler returns its port."""
    torch.set_num_threads(threads)
    store = WeightStore(model, cache=cache)
    context = server_context(certificate=certificate, key=key, tenant_authority=tenant_authority)
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def accept() -> None:
            while True:
                raw, _ = listener.accept()
                raw.settimeout(_ECHO_S)
                raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                with context.wrap_socket(raw, server_side=True) as connection:
                    header = bytearray(_HEADER.size)
                    _fill(connection, header)
                    up, down, repetitions, group, rows = _HEADER.unpack(header)
                    request, reply, matrix = bytearray(up), bytes(down), store.matrix(group)
                    xq = probe_rows(rows, store.manifest().entry(group, by_expert=False).inputs)
                    for _ in range(repetitions):
                        _fill(connection, request)
                        if request[0]:
                            matrix.product(xq)
                        connection.sendall(reply)

        threading.Thread(target=accept, daemon=True).start()
        yield lambda _: int(listener.getsockname()[1])


def _fill(connection: socket.socket, buffer: bytearray) -> None:
    view = memoryview(buffer)
    while view:
        count = connection.recv_into(view)
        if not count:
            raise ConnectionLostError("the other side of the echo closed the connection")
        view = view[count:]


@contextmanager
def echo_connection(
    federation: Federation, peer: Peer, *, port: int, up: int, down: int, repetitions: int, index: int, rows: int
) -> Iterator[Callable[[bool], None]]:
    """Open a connection to the echo server, which shows the certificate of `peer`. Yields a function that makes one
    exchange of `up` and `down` bytes, with a product of `rows` rows if its argument is True."""
    context = federation.tls_context(peer)
    raw = socket.create_connection((peer.host, port), timeout=_ECHO_S)
    raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    with context.wrap_socket(raw, server_hostname=peer.host) as connection:
        check_pin(connection, pins=peer.pins)
        connection.sendall(_HEADER.pack(up, down, repetitions, index, rows))
        requests, reply = [bytes([multiplied]) + bytes(up - 1) for multiplied in (0, 1)], bytearray(down)

        def exchange(multiplied: bool) -> None:
            connection.sendall(requests[multiplied])
            _fill(connection, reply)

        yield exchange
