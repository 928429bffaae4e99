"""Time one pass of the endpoint's engine over the next tokens of one and of eight answers, beside the model's own pass.
To run it: `python -m tests.tenant.endpoint.pass_cost MODEL`.

Offloaded products are computed here (`simulate`). The times are those of one thread, and the passes take turns.
"""

import argparse
import time
from collections.abc import Callable
from functools import partial

import torch

from tenant import RemoteConfig
from tenant.endpoint.engine.packed_model import NextTokens, PackedModel
from tenant.model.loading import load_language_model

_PROMPT = range(5, 37)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--repeat", type=int, default=15)
    given = parser.parse_args()
    torch.set_num_threads(1)
    model = load_language_model(given.model, remote=RemoteConfig(masking="simulate"))
    packed = PackedModel(model)
    passes: dict[str, Callable[[], object]] = {}
    for answers in (1, 8):
        kvs = [packed.new_kv() for _ in range(answers)]
        packed([NextTokens(kv=kv, tokens=_PROMPT) for kv in kvs])
        ids = torch.tensor([list(_PROMPT)] * answers, dtype=torch.int64, device="cpu")
        with torch.no_grad():
            cache = model(input_ids=ids, use_cache=True).past_key_values
        rows = [NextTokens(kv=kv, tokens=[7]) for kv in kvs]
        passes[f"the engine's pass, {answers}"] = partial(packed, rows)
        passes[f"the model's own pass, {answers}"] = partial(
            model, input_ids=ids[:, :1], past_key_values=cache, use_cache=True
        )
    times: dict[str, list[float]] = {name: [] for name in passes}
    with torch.no_grad():
        for _ in range(given.repeat):
            for name, compute in passes.items():
                begin = time.thread_time()
                compute()
                times[name].append(1e3 * (time.thread_time() - begin))
    for name, found in times.items():
        print(f"{name}: {min(found):.1f} ms best, {sorted(found)[len(found) // 2]:.1f} ms median")


if __name__ == "__main__":
    main()
