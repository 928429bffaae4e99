"""`bench chat`: tokens per second of a checkpoint alone and with several streams, beside plain transformers.

The endpoint's engine with masked rows takes turns with `generate()` of the whole model, which has all cores. Prompts
are random tokens, and every answer has the same length, so the figures do not depend on the text.
"""

import os
import queue
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from symbiosis_priv.harness.local import LocalFederation
from tenant.bench.cli_options import Effort
from tenant.bench.result_file import Row
from tenant.endpoint.engine.opening import open_engine
from tenant.endpoint.engine.requests import Done, Engine, Event, Failed, Request
from tenant.model.hf import RemoteConfig, backend_of
from tenant.model.ledger import ledger_of
from tenant.model.loading import load_language_model, load_tokenizer

_START_S, _ANSWER_S = 900.0, 3600.0


def measure_chats(
    directory: Path,
    model: Path,
    *,
    streams: int,
    prompt: int,
    tokens: int,
    masking: str,
    effort: Effort,
    on_turn: Callable[[str], None],
) -> Iterator[Row]:
    """Measure one stream and `streams` streams both ways, by turns; the median of the turns counts.

    Args:
        directory: empty folder.
        model: the checkpoint.
        prompt, tokens: tokens of each prompt, and of each answer.
        masking: the masking scheme.
        effort: turns, and torch threads of tenant and providers.
        on_turn: called with the name of the current measurement.
    """
    on_turn("starting providers")
    options = {"executor": {"threads": effort.threads}}
    with LocalFederation(model, directory, provider_options=options, deadline_s=_START_S) as local:
        whole = load_language_model(model, dtype="float32")
        remote = RemoteConfig(federation=local.federation, masking=masking, pool_memory_mib=effort.pool_memory_mib)
        split = load_language_model(model, remote=remote, dtype="float32")
        engine = open_engine(split, load_tokenizer(model))
        counts = (1, streams) if streams > 1 else (1,)
        seconds: dict[tuple[str, int], list[float]] = {(way, n): [] for n in counts for way in ("whole", masking)}
        trips: dict[int, int] = {}
        for turn in range(effort.repeat + 1):
            for (way, n), found in seconds.items():
                on_turn(f"{way}, {n} streams, {f'turn {turn}' if turn else 'warming up'}")
                prompts = torch.randint(3, whole.config.vocab_size, (n, prompt), dtype=torch.long, device="cpu")
                torch.set_num_threads((os.cpu_count() or 1) if way == "whole" else effort.threads)
                before, began = _round_trips(split), time.perf_counter()
                if way == "whole":
                    _generate(whole, prompts, tokens)
                else:
                    _answer(engine, prompts, tokens)
                    trips[n] = _round_trips(split) - before
                if turn:
                    found.append(time.perf_counter() - began)
        engine.close()
        backend_of(split).close()
    for (way, n), found in seconds.items():
        took = statistics.median(found)
        yield {
            "variant": "whole, fp32" if way == "whole" else f"endpoint, {way}",
            "streams": n,
            "prompt": prompt,
            "tokens": tokens,
            "tokens_per_s": n * tokens / took,
            "token_ms": 1e3 * took / tokens,
            "over_whole": took / statistics.median(seconds["whole", n]),
            "round_trips": trips[n] if way != "whole" else None,
        }


def _generate(model: Any, prompts: torch.Tensor, tokens: int) -> None:
    model.generate(
        input_ids=prompts,
        attention_mask=torch.ones_like(prompts),
        max_new_tokens=tokens,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )


def _answer(engine: Engine, prompts: torch.Tensor, tokens: int) -> None:
    ended: queue.SimpleQueue[Event] = queue.SimpleQueue()

    def take(event: Event) -> None:
        if isinstance(event, Done | Failed):
            ended.put(event)

    for number, ids in enumerate(prompts.tolist()):
        engine.submit(Request(id=str(number), prompt=tuple(ids), max_tokens=tokens), take)
    for _ in prompts:
        last = ended.get(timeout=_ANSWER_S)
        if isinstance(last, Failed):
            raise last.error


def _round_trips(model: Any) -> int:
    ledger = ledger_of(model)
    assert ledger is not None  # the command takes schemes with a session only
    return ledger.executor_round_trips
