"""What eight executors with a range of layers on one card each can serve: `python -m tests.gpu.scale [CHIP]` prints the
tables of docs/scale.md.

Each limit is the tokens (or trained rows) per second that one resource alone would allow, with all layers busy: eight
gateways, cards and PCIe links, and one line of the machine. Cards are data sheets (`tests.gpu.chips`). The executor's
processor was measured on 2026-11-28 on a virtual machine with two cores of an Intel Xeon that other programs used too;
the times are those of the processor.
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from tests.gpu.chips import SHEETS, Sheet, chosen, scheme

CARDS: Final = 8
REQUEST_S: Final = 0.17e-3
"""Of one core: `symbiosis-priv bench provider --tenants 1+0,8+0,16+0 --hidden 64`, `request_cpu_ms` 0.11 to 0.21."""
TLS: Final = 1.9e9  # bytes per second and core, sealed or opened in records of 16 KiB by Python's ssl
PCIE: Final = 25e9  # bytes per second in each direction of each card; assumed: PCIe 4.0 x16
LINES: Final = {"10 Gbit/s": 1.25e9, "100 Gbit/s": 12.5e9}  # in each direction
BATCH: Final = 16  # rows of a product while tenants decode together
PART: Final = 256  # rows of a request while they train
TRAINED: Final = 4096  # rows of a product, over all tenants


@dataclass(frozen=True)
class Model:
    """Layer groups of one block, as (inputs, outputs), and the number of blocks."""

    name: str
    blocks: int
    groups: Sequence[tuple[int, int]]

    @property
    def weights(self) -> int:
        return self.blocks * sum(inputs * outputs for inputs, outputs in self.groups)

    @property
    def up(self) -> int:
        """Bytes of one row's way to the executor, through all groups forward."""
        return self.blocks * sum(4 * inputs for inputs, _ in self.groups)

    @property
    def down(self) -> int:
        return self.blocks * sum(4 * outputs for _, outputs in self.groups)


MODELS: Final = (
    Model("Llama-2-7B", 32, ((4096, 12288), (4096, 4096), (4096, 22016), (11008, 4096))),
    Model("Llama-3-70B", 80, ((8192, 10240), (8192, 8192), (8192, 57344), (28672, 8192))),
)


def arithmetic_s(model: Model, sheet: Sheet, rows: int) -> float:
    """Seconds of one card for a product of every group, with 10-bit weights."""
    kind = scheme(sheet, chosen(sheet.chip), 10, rows)
    return model.blocks * sum(kind.seconds(sheet, rows, inputs=i, outputs=o) for i, o in model.groups)


def limits(model: Model, sheet: Sheet, *, training: bool) -> dict[str, float]:
    """Tokens decoded, or rows trained, per second, by the resource that would be the only one."""
    requests = len(model.groups) * model.blocks
    rows, passes, per_request = (TRAINED, 2, PART) if training else (BATCH, 1, 1)
    # backward, a row's gradient takes the way of the forward pass in the other direction
    both = model.up + model.down
    most = both if training else max(model.up, model.down)  # in one direction
    return {
        "gateways": CARDS * per_request / (REQUEST_S * requests * passes),
        "TLS": CARDS * TLS / (both * passes),
        "PCIe": CARDS * PCIE / most,
        "arithmetic": CARDS * rows / (arithmetic_s(model, sheet, rows) * passes),
        **{name: speed / most for name, speed in LINES.items()},
    }


def table(sheet: Sheet) -> Iterator[str]:
    """The lines of the table, in Markdown."""
    names = "gateways", "TLS", "PCIe", "arithmetic", *LINES
    yield f"| model | per second | {' | '.join(names)} | {' | '.join(f'first at {line}' for line in LINES)} |"
    yield "|---" * (2 + len(names) + len(LINES)) + "|"
    for model in MODELS:
        for training in (False, True):
            found = limits(model, sheet, training=training)
            firsts = []
            for line in LINES:
                here = {name: value for name, value in found.items() if name == line or name not in LINES}
                first = min(here, key=lambda name: here[name])
                firsts.append("the line" if first == line else first)
            work = "trained rows" if training else "tokens"
            values = " | ".join(f"{found[name]:,.0f}" for name in names)
            yield f"| {model.name} | {work} | {values} | {' | '.join(firsts)} |"


def alone(sheet: Sheet) -> Iterator[str]:
    """What one tenant's token takes, and what fits."""
    stored = scheme(sheet, chosen(sheet.chip), 10, 1).stored
    yield "| model | round trips | MB up, down | cards, ms | gateways, ms | weights, GB |"
    yield "|---" * 6 + "|"
    for model in MODELS:
        trips = len(model.groups) * model.blocks
        cards_ms, gateways_ms = 1e3 * arithmetic_s(model, sheet, 1), 1e3 * REQUEST_S * trips
        moved = f"{model.up / 1e6:.1f}, {model.down / 1e6:.1f}"
        size = stored * model.weights / 1e9
        yield f"| {model.name} | {trips} | {moved} | {cards_ms:.1f} | {gateways_ms:.0f} | {size:.0f} |"


if __name__ == "__main__":
    chip = SHEETS[" ".join(sys.argv[1:]) or "H100 SXM"]
    print(*alone(chip), "", *table(chip), sep="\n")
