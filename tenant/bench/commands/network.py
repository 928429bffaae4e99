"""`bench network`: steps and tokens over slow lines."""

from __future__ import annotations

from typing import Annotated

import typer

from symbiosis_priv.display import terminal
from symbiosis_priv.errors import ConfigError
from tenant.bench.commands.options import (
    HALF_THE_CORES,
    Batch,
    Inner,
    Json,
    Layers,
    PoolMemory,
    Repeat,
    Threads,
    Tokens,
    Width,
    llama,
    scheme,
)
from tenant.bench.commands.showing import measuring, show, write


def network(
    *,
    condition: Annotated[
        str, typer.Option(help="Bandwidth, round trip and loss each way, like 100mbit/100ms/0.1%; several by commas.")
    ] = "1gbit/5ms,100mbit/5ms,100mbit/100ms",
    width: Width = 512,
    layers: Layers = 4,
    inner: Inner = 1408,
    batch: Batch = 1,
    tokens: Tokens = 128,
    masking: Annotated[str, typer.Option(help="The scheme.")] = "pad",
    line: Annotated[
        str, typer.Option(help="How to make the line: netem, packets or proxy; auto for the best of them here.")
    ] = "auto",
    repeat: Repeat = 5,
    threads: Threads = HALF_THE_CORES,
    pool_memory_mib: PoolMemory = 1024,
    json: Json = None,
) -> None:
    """Steps and tokens per second over slow lines, beside what round trips and bytes predict.

    The tenant's line has a bandwidth, a delay and losses, in a network
    namespace where this machine makes one, else by a proxy.
    """
    from tenant.bench.lines import KINDS, Condition
    from tenant.bench.network import measure_network

    if line not in (*KINDS, "auto"):
        raise ConfigError(f"--line {line!r}: choose one of auto, {', '.join(KINDS)}")
    conditions = [Condition.parse(text) for text in condition.split(",")]
    with measuring() as (folder, tell):
        rows, made = measure_network(
            folder,
            llama(width, layers, inner),
            batch=batch,
            tokens=tokens,
            conditions=conditions,
            masking=scheme(masking),
            kind=next((kind for kind in KINDS if kind == line), None),
            repeat=repeat,
            threads=threads,
            pool_memory_mib=pool_memory_mib,
            on_turn=tell,
        )
    for work in ("step", "token"):
        show(
            [
                {name: value for name, value in row.items() if name != "difference"}
                for row in rows
                if row["work"] == work
            ]
        )
    console = terminal.console()
    for row in rows:
        if row["difference"] is not None:
            console.print(f"{row['condition']}, {row['work']}: {row['difference']}", soft_wrap=True)
    console.print(f"line: {made}", soft_wrap=True)
    write(json, "network", rows)
