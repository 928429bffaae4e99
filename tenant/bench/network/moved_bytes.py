"""`bench bytes`: the bytes that a tenant moves for a token and for a step of Llama-2-7B and Llama-3-8B.

The bytes are computed from the shapes (`session.traffic`). `bench network` counts the bytes of smaller models at the
socket, and its test requires that both are equal.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final

from symbiosis_priv.arithmetic.ring import BACKWARD, FORWARD, Direction
from symbiosis_priv.checkpoints.discovery.skeleton import traced
from symbiosis_priv.checkpoints.manifest import GroupEntry
from tenant.bench.measured_models import Llama
from tenant.bench.processes.providers import parsed
from tenant.bench.results.result_file import Row
from tenant.session.traffic import PredictedTraffic, of_pass

MODELS: Final = {
    "Llama-2-7B": Llama(width=4096, layers=32, inner=11008, heads=32, key_heads=32),
    "Llama-3-8B": Llama(width=4096, layers=32, inner=14336, heads=32, key_heads=8),
}
"""The models, without their LM heads."""
_STEP_ROWS: Final = 512
_WORK: Final[dict[str, tuple[int, tuple[Direction, ...]]]] = {
    "token": (1, (FORWARD,)),
    f"step of {_STEP_ROWS} tokens": (_STEP_ROWS, (FORWARD, BACKWARD)),
    "its forward pass": (_STEP_ROWS, (FORWARD,)),
    "its backward pass": (_STEP_ROWS, (BACKWARD,)),
}


def moved_bytes(maskings: Sequence[str]) -> Iterator[Row]:
    """Yield a row per model, work and masking, and the ratio to unmasked rows and answers in float16.

    Args:
        maskings: schemes with a helper; the others are compared with the first one.
    """
    for model, shape in MODELS.items():
        config = replace(shape, layers=1).config()
        config.architectures = ["LlamaForCausalLM"]
        groups = [GroupEntry(digest="", **vars(group)) for group in traced(config).groups] * shape.layers
        for work, (rows, directions) in _WORK.items():
            plain = sum(2 * rows * sum(group.columns(d)) for d in directions for group in groups[d == BACKWARD :])
            first = None
            for masking in maskings:
                transport = parsed(masking).transport
                traffic = sum((of_pass(groups, d, rows, transport) for d in directions), PredictedTraffic())
                moved = traffic.up + traffic.down + traffic.effects
                first = first or moved
                yield {
                    "model": model,
                    "work": work,
                    "masking": masking,
                    "up_mb": traffic.up / 1e6,
                    "down_mb": traffic.down / 1e6,
                    "effects_mb": traffic.effects / 1e6,
                    "moved_mb": moved / 1e6,
                    "over_first_masking": moved / first,
                    "over_float16_unmasked": moved / plain,
                }
