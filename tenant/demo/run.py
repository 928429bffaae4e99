"""The stages of `make demo`: fine-tuning, generation and tampering on one machine, with provider processes."""

import math
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from symbiosis_priv.arithmetic.ring import DIRECTIONS
from symbiosis_priv.checkpoints.checkpoint import resolve
from symbiosis_priv.checkpoints.discovery.skeleton import load_config
from symbiosis_priv.display import terminal
from symbiosis_priv.errors import VerificationError
from symbiosis_priv.federation import Federation, Peer, load_federation
from symbiosis_priv.harness.base_model import PRIVATE_PROMPT, cached_base_model, private_text
from symbiosis_priv.harness.local import LocalFederation, silenced
from symbiosis_priv.harness.wiretaps import ExecutorKiller
from symbiosis_priv.limits import GroupIndex
from symbiosis_priv.network import wire
from symbiosis_priv.network.wire import Role
from tenant.demo.claims import Measurements
from tenant.model.hf import RemoteConfig, backend_of
from tenant.model.ledger import ledger_of, since
from tenant.model.loading import load_adapter, load_model, load_tokenizer
from tenant.model.remote_linear import RemoteLayer
from tenant.options import SessionOptions
from tenant.preparation.keys import prepare
from tenant.preparation.prepared import Preparation
from tenant.session.session import Session
from tenant.session.tally import Ledger
from tenant.training.corpus import context_of, hold_out, read_documents, to_blocks
from tenant.training.finetune import finetune
from tenant.training.generate import open_model
from tenant.training.options import FineTuning
from tenant.training.quantisation_error import compare
from tenant.training.trainer import Progress as Figures

_TAMPERED = 48
_REQUESTS = 7  # requests of a step after which an executor is killed
_PRIVATE_RECORDS = 750
_SEQUENCE_LENGTH = 96
_NEW_TOKENS = 48
_PROMPT_TOKENS = 8
# The demo's tiny model needs a higher learning rate than a user's model.
_OWN_RATE, _USUAL_RATE = 1e-2, 2e-4


@contextmanager
def _stage(name: str, seconds: dict[str, float]) -> Iterator[Callable[[int, int, float], None]]:
    """Context manager: announces a stage, yields a function that shows its progress, and measures its time."""
    terminal.say(f"{name} ...")
    began = time.perf_counter()
    with terminal.progress_bar(name) as update:
        yield lambda done, total, loss: update(done, total)
    seconds[name] = time.perf_counter() - began


def run(work: Path, *, cache: Path, model: str | Path | None, text: Path | None, steps: int) -> Measurements:
    """Fine-tune, generate, tamper with answers, and compare with a run without providers. `work`: an empty folder for
    keys, logs and adapters. `cache`: keeps the demo's base model between runs. `model`, `text`: a user's own. Raises
    `SymbiosisError`: the text is too short, or loading, a provider or the session has failed."""
    if text is None:
        text = work / "private.txt"
        text.write_text("\n\n".join(private_text(seed=0, records=_PRIVATE_RECORDS)), encoding="utf-8")
    documents = read_documents(text)  # first, so that an error in the user's file is reported before a long stage
    seconds: dict[str, float] = {}
    stage = partial(_stage, seconds=seconds)
    with stage("base model") as progress:
        path = resolve(model) if model else cached_base_model(cache, work, on_progress=progress)
        length = min(_SEQUENCE_LENGTH, context_of(load_config(path)) or _SEQUENCE_LENGTH)
        blocks = to_blocks(documents, load_tokenizer(path), length=length)
    options = FineTuning(
        steps=steps,
        learning_rate=_USUAL_RATE if model else _OWN_RATE,
        batch_size=8,
        sequence_length=length,
        save_every=max(steps, 1),
        dtype="float32",
    )
    simulate = RemoteConfig(masking="simulate", cache=work / "cache")
    with stage("reference run") as progress:

        def on_progress(step: Figures) -> None:
            progress(step.done, step.total, step.losses[-1])

        reference = finetune(path, text, work / "reference", remote=simulate, options=options, on_progress=on_progress)
    local = LocalFederation(path, work / "federation", executors=2, provider_options={"executor": {"threads": 1}})
    try:
        with stage("providers"):
            local.start()
        killer = ExecutorKiller(local.kill)
        remote = RemoteConfig(federation=local.federation, cache=work / "cache", wiretap=killer)
        with stage("masked run") as progress:

            def kill_in_the_middle(step: Figures) -> None:
                on_progress(step)
                if step.done == steps // 2:  # an executor is killed in the middle of the next step
                    killer.arm(requests=_REQUESTS)

            if steps == 1:
                killer.arm(requests=_REQUESTS)
            masked = finetune(
                path, text, work / "masked", remote=remote, options=options, on_progress=kill_in_the_middle
            )
        if killer.victim is not None:
            with stage("restart of the executor"):
                local.restart(killer.victim)
        with stage("tampering"):
            federation = load_federation(local.federation)
            # without the killed executor, the other one is the only one to ask after a refusal
            peers = tuple(peer for peer in federation.peers if peer.name != killer.victim)
            prepared = prepare(None, digest=federation.model_digest, cache=work / "cache")
            refused = rejected(replace(federation, peers=peers), prepared, trials=_TAMPERED)
        with stage("generation and quality"):
            with _opened(path, remote, None) as (split, tokenizer):
                prompt = PRIVATE_PROMPT
                if not documents[-1].startswith(prompt):
                    ids = tokenizer(documents[-1])["input_ids"][:_PROMPT_TOKENS]
                    prompt = str(tokenizer.decode(ids, skip_special_tokens=True))
                before, _ = _continue(split, tokenizer, prompt)
                tenant_bytes, offloaded_bytes = _tensor_bytes(split)
            with _opened(path, simulate, reference.adapter) as (split, _):
                simulated, _ = _continue(split, tokenizer, prompt)
            full = load_model(path, dtype=torch.float32)
            full_bytes, _ = _tensor_bytes(full)
            train, held_out = hold_out(blocks)
            with _opened(path, remote, masked.adapter) as (split, _):
                after, generation = _continue(split, tokenizer, prompt)
                # The adapter was trained on masked rows. Here plain PEFT loads it on the ordinary model.
                quality = compare(load_adapter(full, masked.adapter), split, held_out or train)
    finally:
        local.stop()
    adapters = [load_file(run.adapter / "adapter_model.safetensors") for run in (masked, reference)]
    equal = sum(name in adapters[1] and torch.equal(t, adapters[1][name]) for name, t in adapters[0].items())
    assert masked.progress.ledger is not None  # a masked run has a session
    return Measurements(
        losses=masked.progress.losses,
        simulated_losses=reference.progress.losses,
        perplexity_before=math.exp(masked.loss_before),
        perplexity_after=math.exp(masked.loss_after),
        held_out=masked.held_out,
        adapter_tensors=len(adapters[0]),
        adapter_tensors_equal=equal,
        tokens_before=before,
        tokens_after=after,
        tokens_simulated=simulated,
        prompt=prompt,
        text_before=_decoded(before, tokenizer),
        text_after=_decoded(after, tokenizer),
        quality=quality,
        ledger=masked.progress.ledger,
        trained_tokens=masked.progress.tokens,
        generation=generation,
        killed=killer.victim,
        successor=killer.successor,
        recovery_s=killer.recovery_s,
        tampered=_TAMPERED,
        tampered_rejected=refused,
        tenant_bytes=tenant_bytes,
        offloaded_bytes=offloaded_bytes,
        full_bytes=full_bytes,
        seconds=seconds,
    )


@contextmanager
def _opened(path: Path, remote: RemoteConfig, adapter: Path | None) -> Iterator[tuple[Any, PreTrainedTokenizerBase]]:
    model, tokenizer = open_model(path, remote=remote, adapter=adapter, dtype="float32")
    with backend_of(model):
        yield model, tokenizer


def _continue(model: Any, tokenizer: PreTrainedTokenizerBase, prompt: str) -> tuple[tuple[int, ...], Ledger]:
    """Return a fixed number of greedy tokens, so that end tokens do not shorten the comparison."""
    inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
    started = ledger_of(model) or Ledger()
    read = inputs["input_ids"].shape[1]
    count = min(_NEW_TOKENS, (context_of(model.config) or read + _NEW_TOKENS) - read)
    ids = model.generate(**inputs, max_new_tokens=count, do_sample=False, eos_token_id=None, pad_token_id=0)
    new = ids[0, read:].tolist()
    return tuple(new), since(started, ledger_of(model) or Ledger())


def _decoded(tokens: tuple[int, ...], tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the decoded text up to its end token."""
    end = tokens.index(tokenizer.eos_token_id) if tokenizer.eos_token_id in tokens else len(tokens)
    return str(tokenizer.decode(list(tokens[:end]), skip_special_tokens=True))


def _tensor_bytes(model: nn.Module) -> tuple[int, int]:
    """Return (bytes of all parameters, each shared parameter counted once; bytes of offloaded layers)."""
    tensors = {id(t): t for t in model.parameters()}
    offloaded = [t for m in model.modules() if isinstance(m, RemoteLayer) for t in (*m.parameters(), *m.buffers())]
    return sum(t.nbytes for t in tensors.values()), sum(t.nbytes for t in offloaded)


_ROWS = 4
_LARGEST = 64  # largest entry of a row; the check does not depend on the entries


def _entry(answer: Tensor, rng: random.Random) -> Tensor:
    """Return a view of one entry, chosen at random."""
    return answer[rng.randrange(answer.shape[0]), rng.randrange(answer.shape[1])]


_ALTERATIONS: tuple[Callable[[random.Random, Tensor], object], ...] = (
    lambda rng, answer: _entry(answer, rng).bitwise_xor_(1 << rng.randrange(31)),
    lambda rng, answer: _entry(answer, rng).add_(1),
    lambda rng, answer: _entry(answer, rng).bitwise_xor_(-(1 << 31)),
    lambda rng, answer: answer.copy_(answer.flip(0)),
    lambda rng, answer: answer[rng.randrange(len(answer))].fill_(rng.randrange(-(1 << 31), 1 << 31)),
    lambda rng, answer: answer[0].copy_(answer[-1]),
)


class Tamper:
    """A `Wiretap` that alters every answer of providers with one role, as a dishonest provider would."""

    def __init__(self, role: Role, alter: Callable[[Tensor], object]) -> None:
        self._role, self._alter = role, alter

    def sent(self, peer: Peer, message: wire.Message, payload: Tensor | None) -> None:
        """Does nothing: requests are not altered."""

    def received(self, peer: Peer, message: wire.Message, payload: Tensor | None) -> None:
        if peer.role == self._role and isinstance(message, wire.Result) and payload is not None:
            self._alter(payload)


@silenced("tenant.core.masked")
def rejected(federation: Federation, preparation: Preparation, *, trials: int) -> int:
    """Send `trials` requests, alter answers of the executor and of the helper in turn, and count the refused ones."""
    rng = random.Random(0)
    # keep the keys: this process altered the answers, so no provider has learned from refusals
    preparation = replace(preparation, forget_keys=lambda: None)
    refused = 0
    for trial in range(trials):
        role: Role = "helper" if trial % 2 else "executor"
        tamper = Tamper(role, partial(_ALTERATIONS[trial // 2 % len(_ALTERATIONS)], rng))
        options = SessionOptions(masking="pad", pool_memory=0, wiretap=tamper)
        session = Session(federation, preparation, options=options)
        index, direction = GroupIndex(rng.randrange(len(preparation.facts))), rng.choice(DIRECTIONS)
        width = preparation.facts[index].inputs(direction)
        values = [[rng.randrange(-_LARGEST, _LARGEST) for _ in range(width)] for _ in range(_ROWS)]
        rows = torch.tensor(values, dtype=torch.int32, device="cpu")
        try:
            session.product(index, direction, rows)
        except VerificationError:
            refused += 1
        finally:
            session.close()
    return refused
