"""Read a prompt of 65,536 tokens within a memory limit, beside short answers. To run it:
`python -m tests.tenant.endpoint.long_context`.

It compares the first token's log probabilities with those of one pass over the whole prompt, bit by bit, and the logits
with the model's own pass. Offloaded products are computed here (`simulate`), in the arithmetic of the providers. The
command fails if a goal is missed.
"""

import argparse
import itertools
import json
import resource
import statistics
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch

from symbiosis_priv.errors import ConfigError
from symbiosis_priv.harness.base_model import Pretraining, make_base_model
from tenant import RemoteConfig
from tenant.endpoint.engine.answer import token_logprob
from tenant.endpoint.engine.attention import Attention
from tenant.endpoint.engine.continuous import ContinuousEngine, EngineLimits
from tenant.endpoint.engine.kv import BLOCK, KeyValues, Shape
from tenant.endpoint.engine.packed_model import NextTokens, PackedModel
from tenant.endpoint.engine.requests import Done, EngineRequest, Event, Failed, Sampling, Token
from tenant.model.loading import load_language_model, load_tokenizer
from tests.compatibility.families import build

_SHORT = 24  # tokens of the prompts beside
_DIFFERENCE = "largest difference to transformers' pass, of the largest logit"
_TOLERANCE = 1e-3  # attention of transformers adds in another order


class Answers:
    """A sink that keeps tokens, the times between them, and the end."""

    def __init__(self) -> None:
        self.tokens: list[Token] = []
        self.gaps: list[float] = []
        self.ended = threading.Event()
        self._last: float | None = None

    def __call__(self, event: Event) -> None:
        now = time.monotonic()
        if isinstance(event, Token):
            self.tokens.append(event)
            if self._last is not None:
                self.gaps.append(now - self._last)
            self._last = now
        if isinstance(event, (Done, Failed)):
            self.ended.set()
            assert not isinstance(event, Failed), event


def small_model(context: int) -> Any:
    """A Llama with random weights, two layers, 8 query heads and 2 heads of keys, for `context` tokens."""
    sizes = {"vocab_size": 320, "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8, "head_dim": 32}
    rope = {"rope_type": "default", "rope_theta": 1e6}
    random = {"rope_parameters": rope, "initializer_range": 0.2}
    return build("LlamaForCausalLM", max_position_embeddings=context, **sizes, **random)


def read_beside_others(engine: ContinuousEngine, prompt: tuple[int, ...]) -> tuple[Answers, list[float], float, int]:
    """Read the prompt while short answers are generated one after the other.

    Returns:
        The answer, the times between tokens of the short answers, the seconds, and the most memory that was reserved.
    """
    stop, gaps, held = threading.Event(), list[float](), 0

    def chat() -> None:
        for number in itertools.count():
            if stop.is_set():
                return
            sink = Answers()
            short = tuple((number + i) % 300 for i in range(_SHORT))
            engine.submit(EngineRequest(id="short", prompt=short, client="other", max_tokens=64), sink)
            assert sink.ended.wait(600)
            gaps.extend(sink.gaps)
            nonlocal held
            held = max(held, engine.load().memory)

    other = threading.Thread(target=chat)
    begin, answer = time.monotonic(), Answers()
    engine.submit(EngineRequest(id="long", prompt=prompt, max_tokens=8, sampling=Sampling(logprobs=5)), answer)
    other.start()
    assert answer.ended.wait(3600)
    seconds = time.monotonic() - begin
    stop.set()
    other.join()
    return answer, gaps, seconds, held


def decode_ms(length: int) -> float:
    """Attention of one token of one layer with 32 query heads and 8 heads of keys, of width 64: the best of 5."""
    torch.manual_seed(0)
    kv = KeyValues(Shape(windows=(None,), heads=8, key_width=64, value_width=64, dtype=torch.float32))
    for _ in range(length // BLOCK):
        kv.grow(BLOCK)
        kv.write(0, torch.randn(BLOCK, 8, 64), torch.randn(BLOCK, 8, 64))
    query, times = torch.randn(1, 32, 64), []
    for _ in range(5):
        begin = time.perf_counter()
        kv.truncate(kv.length - 1)
        kv.grow(1)
        new = Attention([(kv, 1)])
        new.append(0, torch.randn(1, 8, 64), torch.randn(1, 8, 64))
        new.attend(0, query, scaling=0.125)
        times.append(time.perf_counter() - begin)
    return 1e3 * min(times)


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def measure(tokens: int, folder: Path) -> dict[str, Any]:
    """Read a prompt of so many tokens in chunks, in the memory that it needs, and compare with one pass over it."""
    recipe = Pretraining(steps=1, batch=1, window=16, sentences=300, vocab=320, width=64, blocks=1)
    checkpoint = make_base_model(folder / "tokenizer", recipe=recipe)
    small_model(tokens + 4 * BLOCK).save_pretrained(checkpoint)
    model = load_language_model(checkpoint, remote=RemoteConfig(masking="simulate"))
    packed = PackedModel(model)
    generator = torch.Generator(device="cpu").manual_seed(1)
    prompt = tuple(torch.randint(3, 320, (tokens,), generator=generator, dtype=torch.int64, device="cpu").tolist())
    memory = packed.shape.bytes(tokens + 8) + packed.shape.bytes(_SHORT + 64)
    engine = ContinuousEngine(packed, load_tokenizer(checkpoint), limits=EngineLimits(memory=memory))
    warm = Answers()
    engine.submit(EngineRequest(id="warm", prompt=prompt[:512], max_tokens=2), warm)
    assert warm.ended.wait(600)
    before = peak_bytes()
    answer, gaps, seconds, held = read_beside_others(engine, prompt)
    grown = peak_bytes() - before
    try:
        engine.submit(EngineRequest(id="too long", prompt=(*prompt, 1), max_tokens=2 * BLOCK), Answers())
        refusal = ""
    except ConfigError as error:
        refusal = str(error)
    kv = packed.new_kv()
    ((logits, _),) = packed([NextTokens(kv=kv, tokens=prompt)])
    uncut = token_logprob(logits[0], int(logits[0].argmax()), top=5)
    engine.close()
    with torch.no_grad():
        own = model(input_ids=torch.tensor([prompt], dtype=torch.int64, device="cpu"), logits_to_keep=1).logits[0, 0]
    return {
        "tokens": tokens,
        "keys and values, MiB": packed.shape.bytes(tokens + 8) / 2**20,
        "memory limit, MiB": memory / 2**20,
        "most memory reserved, MiB": held / 2**20,
        "resident memory grew by, MiB": grown / 2**20,
        "seconds": seconds,
        "tokens of others meanwhile": len(gaps),
        "between two of them, s, median and largest": [statistics.median(gaps), max(gaps)] if gaps else None,
        "bits of one uncut pass": answer.tokens[0].logprob == uncut,
        _DIFFERENCE: float((own - logits[0]).abs().max() / own.abs().max()),
        "refusal of what does not fit": refusal,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=65536)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = measure(given.tokens, Path(folder))
    found["attention of a token, 32 heads over 8, ms per layer"] = decode_ms(given.tokens)
    goals = {
        "the limit is kept": found["most memory reserved, MiB"] <= found["memory limit, MiB"],
        "the bits are those of one uncut pass": found["bits of one uncut pass"],
        "the logits are those of transformers": found[_DIFFERENCE] <= _TOLERANCE,
        "tokens of others came meanwhile": found["tokens of others meanwhile"] > 0,
        "what does not fit is refused with the numbers": "bytes" in found["refusal of what does not fit"],
    }
    print(json.dumps({**found, "goals": goals}, indent=2))
    if not all(goals.values()):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
