"""Goals for the figures of benchmarks, with two cores that all processes share.

A goal is a ratio of figures of one run, so that it has the same meaning on every machine. Rows that a benchmark has not
measured have no goals.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from symbiosis_priv.limits import DEFAULT_WEIGHT_BITS
from tenant.bench.results.result_file import Row, Value


@dataclass(frozen=True)
class Goal:
    """A limit for one figure.

    Args:
        at_most, at_least: the limit. One of them is None.
    """

    what: str
    measured: float
    at_most: float | None = None
    at_least: float | None = None

    @property
    def wanted(self) -> str:
        """The limit as text."""
        return f"at most {self.at_most:g}" if self.at_most is not None else f"at least {self.at_least:g}"

    @property
    def reached(self) -> bool:
        """True if the figure is within its limit; False for NaN."""
        if self.at_most is not None:
            return self.measured <= self.at_most
        return self.at_least is not None and self.measured >= self.at_least

    @property
    def verdict(self) -> str:
        """`reached` as text."""
        return "reached" if self.reached else "missed"


def goals(benchmark: str, rows: Sequence[Row]) -> list[Goal]:
    """Return the goals for a benchmark's rows."""
    wanted = _WANTED.get(benchmark)
    return [] if wanted is None else list(wanted(rows))


def _step(rows: Sequence[Row]) -> Iterator[Goal]:
    for shape in _distinct(rows, "width", "layers"):
        variants = _by(_where(rows, **shape), "variant")
        width = _number(shape["width"])
        if (pad := variants.get("split, pad")) is None:
            continue
        if width >= 2048:
            what = f"tenant's CPU with pads over the whole model's, width {width:.0f}"
            yield Goal(what, _number(pad["tenant_cpu_over_whole"]), at_most=0.30 if width < 4096 else 0.20)
        if (none := variants.get("split, none")) is not None:
            for figure, name in (("tenant_cpu_s", "tenant's CPU"), ("wall_s", "wall time")):
                what = f"{name} with pads over that without masks, width {width:.0f}"
                yield Goal(what, _ratio(pad, none, figure), at_most=1.2)


def _token(rows: Sequence[Row]) -> Iterator[Goal]:
    for shape in _distinct(rows, "width", "layers"):
        variants = _by(_where(rows, **shape), "variant")
        none, pad = variants.get("split, none"), variants.get("split, pad")
        if none is not None:
            yield Goal("a token without masks over the whole model's", _number(none["token_over_whole"]), at_most=1.0)
        if none is not None and pad is not None:
            yield Goal("a token with pads over one without masks", _ratio(pad, none, "token_ms"), at_most=1.15)


def _linear(rows: Sequence[Row]) -> Iterator[Goal]:
    for row in rows:
        if _number(row["width"]) >= 2048:
            what = f"a masked linear over product and echo, width {row['width']}, rows {row['rows']}"
            yield Goal(what, _number(row["masked_over_floor"]), at_most=1.3)


def _kernels(rows: Sequence[Row]) -> Iterator[Goal]:
    chosen = [row for row in rows if row["chosen"]]
    for name in _by(chosen, "kernel"):
        for few, at_most in ((True, 0.7), (False, 1.25)):
            of_size = [row for row in _where(chosen, kernel=name) if (_number(row["rows"]) <= 8) == few]
            if of_size:
                what = f"{name}'s slowest product over float32's, {'up to 8 rows' if few else 'more rows'}"
                slowest = max(_number(row["over_float32"]) for row in of_size)
                yield Goal(what, slowest, at_most=at_most if name == _WITH_VNNI else 2.2)


def _start(rows: Sequence[Row]) -> Iterator[Goal]:
    found = _by(rows, "what")
    if (warm := found.get("provider, warm cache")) is not None:
        yield Goal("seconds to a provider with a warm cache", _number(warm["wall_s"]), at_most=2)
    if (keys := found.get("tenant, verification keys")) is not None:
        yield Goal("verification keys over reading", _number(keys["over_reading"]), at_most=3)


def _provider(rows: Sequence[Row]) -> Iterator[Goal]:
    for scene in _distinct(rows, "generating", "generating_rows", "training", "ranks", "sharding"):
        policies = _by(_where(rows, **scene), "policy")
        ours = policies.get("opportunistic")
        if ours is None or not (scene["generating"] and scene["training"]):
            continue
        sizes = f"{scene['generating']} with rows {scene['generating_rows']}, {scene['training']} train"
        for other in ("none", "lockstep"):
            if (theirs := policies.get(other)) is not None:
                yield Goal(f"tokens a second over {other}'s, {sizes}", _ratio(ours, theirs, "tokens_per_s"), at_least=1)
                yield Goal(f"mean latency over {other}'s, {sizes}", _ratio(ours, theirs, "token_mean_ms"), at_most=1)
    alone = [row for row in rows if row["policy"] == "opportunistic" and not row["training"]]
    counts = _by(alone, "generating")
    mixed = _where(rows, policy="opportunistic", generating=6, training=2)
    if 6 in counts and mixed:
        what = "median latency of six tenants with two training ones, over six alone"
        yield Goal(what, _ratio(mixed[0], counts[6], "token_p50_ms"), at_most=1.5)
    if 1 in counts and 16 in counts:
        tokens = _ratio(counts[16], counts[1], "tokens_per_s")
        yield Goal("tokens of sixteen tenants over those of one", tokens, at_least=4)
    if 16 in counts:
        what = "products' share of the executor's busy time, sixteen tenants"
        yield Goal(what, _number(counts[16]["product_share"]), at_least=0.9)


def _abuse(rows: Sequence[Row]) -> Iterator[Goal]:
    for row in rows:
        if not str(row["abuse"]).startswith("control"):
            what = f"an honest tenant's median over alone: {row['abuse']}"
            yield Goal(what, _number(row["beside_over_alone"]), at_most=1.5)


def _ranks(rows: Sequence[Row]) -> Iterator[Goal]:
    for row in rows:
        if _number(row["groups"]) > 1:  # with one group of ranks, every tenant waits for its restart
            what = f"others' median over before: {row['lost']}"
            yield Goal(what, _number(row["meanwhile_over_before"]), at_most=1.5)


def _tasks(rows: Sequence[Row]) -> Iterator[Goal]:
    for measurement, variant, what, at_least in (
        ("memory", "one model", "tasks in the memory of as many full copies", 26),
        ("batch, whole model", "mixed batch", "time of one task after the other over a mixed batch's, whole", 2),
        ("batch, split model", "mixed batch", "round trips of one task after the other over a mixed batch's", 10),
        ("coordinated batching", "coordinated", "time of batches of fixed size over coordinated ones'", 1.2),
    ):
        for row in _where(rows, measurement=measurement, variant=variant):
            yield Goal(what, _number(row["gain"]), at_least=at_least)


def _quality(rows: Sequence[Row]) -> Iterator[Goal]:
    for row in _where(rows, ring_bits=24):
        if row["weight_bits"] == DEFAULT_WEIGHT_BITS:
            what = "1 - mean cosine in a ring of 24 bits, over bfloat16's"
            yield Goal(what, _number(row["error_over_bfloat16"]), at_most=1.0)
        what = f"rows of a million that are sent again, {row['weight_bits']} weight bits"
        yield Goal(what, _number(row["repeated_per_million"]), at_most=1.0)


def _network(rows: Sequence[Row]) -> Iterator[Goal]:
    for row in _where(rows, masking=_NEW_WIRE):
        if str(row["condition"]).startswith("100 Mbit/s") and str(row["work"]).endswith("overlapped"):
            what = f"an overlapped step over today's, {row['condition']}"
            yield Goal(what, _number(row["over_first"]), at_most=0.5)


def _bytes(rows: Sequence[Row]) -> Iterator[Goal]:
    for row in _where(rows, masking=_NEW_WIRE):
        if not str(row["work"]).startswith("its"):
            what = f"{row['model']}, {row['work']}: bytes over"
            yield Goal(f"{what} today's", _number(row["over_first_masking"]), at_most=0.46)
            yield Goal(f"{what} float16's without masks", _number(row["over_float16_unmasked"]), at_most=1.55)


def _endpoint(rows: Sequence[Row]) -> Iterator[Goal]:
    for row in _where(rows, variant="all together"):
        what = f"tokens a second of {row['streams']} answers together over one after another"
        yield Goal(what, _number(row["over_one_after_another"]), at_least=4)


_WITH_VNNI: Final = "native-avx512"
_NEW_WIRE: Final = "pad/24/relay"
_WANTED: Final[dict[str, Callable[[Sequence[Row]], Iterator[Goal]]]] = {
    "step": _step,
    "token": _token,
    "linear": _linear,
    "kernels": _kernels,
    "start": _start,
    "provider": _provider,
    "abuse": _abuse,
    "ranks": _ranks,
    "tasks": _tasks,
    "quality": _quality,
    "network": _network,
    "bytes": _bytes,
    "endpoint": _endpoint,
}


def _distinct(rows: Sequence[Row], *names: str) -> list[Row]:
    """Return the different combinations of values in these columns, in order."""
    return [
        dict(zip(names, values, strict=True)) for values in dict.fromkeys(tuple(map(row.get, names)) for row in rows)
    ]


def _where(rows: Sequence[Row], **values: Value) -> list[Row]:
    return [row for row in rows if all(row.get(name) == value for name, value in values.items())]


def _by(rows: Sequence[Row], name: str) -> dict[Value, Row]:
    return {row[name]: row for row in rows}


def _ratio(row: Row, other: Row, figure: str) -> float:
    over = _number(other[figure])
    return _number(row[figure]) / over if over else float("nan")


def _number(value: Value) -> float:
    return float("nan") if value is None or isinstance(value, str) else float(value)
