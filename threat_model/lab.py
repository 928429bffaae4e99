"""A real run to attack: a base model, an executor and three helpers behind TLS, and a tenant that trains and generates.

    with Lab(folder) as lab:
        recording = lab.record(schemes.PAD, WORKLOAD)

The base model is a Llama of three blocks, pretrained for seconds on public text. The tenant's text is private. Every
product is sent over a TLS socket, and the recorder is at the tenant's end of it.
"""

import copy
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Self
from unittest import mock

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from provider.config import schema
from provider.serve import Provider
from symbiosis_priv.arithmetic.keystream import expand, random_key
from symbiosis_priv.arithmetic.ring import BACKWARD, DIRECTIONS, FORWARD, Direction
from symbiosis_priv.certificates.issuing import create_authority, issue
from symbiosis_priv.certificates.reading import Identity, Kind
from symbiosis_priv.checkpoints.layers import RoundTrips, Scope
from symbiosis_priv.checkpoints.weights import WeightStore
from symbiosis_priv.federation import Peer, federation_text, load_federation
from symbiosis_priv.harness.base_model import Pretraining, make_base_model, private_text, public_text
from symbiosis_priv.limits import DEFAULT_HINT_BITS
from symbiosis_priv.network import wire
from symbiosis_priv.network.tls import client_context
from tenant import RemoteConfig, backend_of
from tenant.connections.channel import Channel, Wiretap, fresh_nonce
from tenant.core.masked import UNMASKED_BY_CHOICE, mask
from tenant.endpoint.engine.continuous import ContinuousEngine, EngineLimits
from tenant.endpoint.engine.packed_model import NextTokens, Output, PackedModel
from tenant.endpoint.engine.requests import Done, EngineRequest, Event, Failed
from tenant.masking.registry import registered
from tenant.masking.scheme import SessionScheme
from tenant.preparation.keys import prepare
from threat_model.attacks.collusion import matching, pad_rows
from threat_model.evidence.chats import Chat, Step, StepRecorder
from threat_model.evidence.public import Public, alone
from threat_model.evidence.schemes import AttackedScheme
from threat_model.evidence.truth import NO_LABEL, Truth, Witness, adapter_updates
from threat_model.evidence.views import NO_NEIGHBOUR, Game, NeighbourView, Recorder, Views


@dataclass(frozen=True, kw_only=True)
class Workload:
    """The tenant's work during a recording: LoRA training steps on `[batch, length]` tokens, and calls of `generate` on
    `[prompts, prompt_length]` tokens. `game_rows`: rows of the distinguishing game, per direction."""

    steps: int = 16
    batch: int = 4
    length: int = 24
    generations: int = 6
    prompts: int = 80
    prompt_length: int = 8
    new_tokens: int = 6
    game_rows: int = 4096
    seed: int = 7


FULL = Workload()
QUICK = Workload(steps=6, batch=6, generations=3, prompts=134, new_tokens=2, game_rows=2048)
PLANTED = Workload(steps=2, generations=1, prompts=16, new_tokens=2, game_rows=512)
"""For faults that reveal every row: a few thousand rows rule out chance."""


@dataclass(frozen=True, eq=False)
class Recording:
    scheme: AttackedScheme
    views: Views
    truth: Truth


class Lab:
    """A context manager that runs providers, and records what each party sees. `folder` is an empty folder for the
    checkpoint, keys and caches. `tied` is that of `Pretraining`. 1 to 3 `helpers` are started; each
    scheme states how many it needs. `one_company` is a federation file whose only helper belongs to the executor's
    company: no tenant may use it. With `round_trips` 2, providers have composed groups: tenants use them in every pass
    without gradients, and the distinguishing game is played at the first of them."""

    def __init__(self, folder: Path, *, tied: bool = False, helpers: int = 3, round_trips: RoundTrips = 4) -> None:
        self.folder, self.cache, self._scope = folder, folder / "cache", Scope(round_trips=round_trips)
        self._tied, self._helpers = tied, helpers

    def __enter__(self) -> Self:
        recipe = Pretraining(steps=60, window=48, sentences=1500, vocab=320, width=64, blocks=3, tied=self._tied)
        checkpoint = make_base_model(self.folder / "model", recipe=recipe)
        model = AutoModelForCausalLM.from_pretrained(checkpoint, trust_remote_code=False)
        model.requires_grad_(False)
        tokenizer = AutoTokenizer.from_pretrained(checkpoint, trust_remote_code=False)
        self.store = WeightStore(checkpoint, cache=self.cache, scope=self._scope)
        digest = self.store.manifest().digest
        prepared = prepare(self.store, digest=digest, cache=self.cache)
        for scheme in registered():
            if isinstance(scheme, SessionScheme):
                scheme.prepare(prepared, self.store, bits=DEFAULT_HINT_BITS, training=True)
        self.public = Public(
            model,
            self.store,
            torch.tensor(tokenizer.encode(public_text(seed=1, sentences=400))),
            int(model.config.pad_token_id or 0),
            alone(len(self.store.manifest().groups)),
        )
        # clinic notes and letters: the attack on adapters needs many different first tokens
        text = "\n".join(private_text(seed=2, records=400)) + public_text(seed=3, sentences=800)
        self._private = torch.tensor(tokenizer.encode(text))
        with ExitStack() as starting:
            self._entries = list(self._start_providers(checkpoint, starting))
            written = [self.write_federation(f"{n}", n) for n in range(self._helpers + 1)]
            self.federation_path, self.federation = written[1], load_federation(written[1])
            company = {"Holding SE": ["executor", "helper"]}
            self.one_company = self.write_federation("company", 1, pads={"helpers": 1}, companies=company)
            self._stack = starting.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _start_providers(self, checkpoint: Path, stack: ExitStack) -> Iterator[Mapping[str, object]]:
        """Start an executor and then the helpers. Yields each provider's entry in a federation file."""
        keys = self.folder / "keys"
        authority = create_authority(keys)
        issue(keys, authority=authority, kind=Kind.TENANT, name="alice")
        self._mallory = issue(keys, authority=authority, kind=Kind.TENANT, name="mallory")
        helpers = ("helper", "second-helper", "third-helper")[: self._helpers]
        identities = {
            name: issue(keys, authority=None, kind=Kind.PROVIDER, name=name) for name in ("executor", *helpers)
        }
        for name, identity in identities.items():
            role: wire.Role = "executor" if name == "executor" else "helper"
            config = schema.ProviderConfig(
                name=name,
                listen="localhost:0",
                roles=(role,),
                log_level="warning",
                model=schema.ModelConfig(
                    checkpoint=str(checkpoint), cache=self.cache, round_trips=self._scope.round_trips
                ),
                tls=schema.TlsConfig(
                    certificate=identity.certificate, key=identity.key, tenant_authority=authority.certificate
                ),
                executor=schema.ExecutorConfig(float_memory_mib=2048),
            )
            address = stack.enter_context(Provider(config)).address
            entry = {"name": name, "operator": f"operator of the {name}", "role": role, "address": address}
            yield entry | {"certificate": f"keys/{name}.pem"}

    def write_federation(self, name: str, helpers: int, **tables: Any) -> Path:
        """Write `federation-<name>.toml` with the first `helpers` helpers, and tables of `federation_text`."""
        path, digest = self.folder / f"federation-{name}.toml", self.store.manifest().digest
        providers = self._entries[: 1 + helpers]
        path.write_text(
            federation_text(
                providers,
                digest=digest,
                scope=self._scope,
                certificate="keys/alice.pem",
                key="keys/alice.key",
                **tables,
            )
        )
        return path

    def private_windows(self, count: int, length: int, *, seed: int) -> Tensor:
        """Pieces of the tenant's text, int64 `[count, length]`."""
        starts = torch.randint(len(self._private) - length, (count,), generator=torch.Generator().manual_seed(seed))
        return torch.stack([self._private[s : s + length] for s in starts.tolist()])

    def record(self, scheme: AttackedScheme, workload: Workload, *, federation: Path | None = None) -> Recording:
        """Fine-tune and generate under a scheme, and record all views. `federation`: another file than the scheme's."""
        recorder, truth = Recorder(), Truth(steps=workload.steps)
        chosen = federation or self.folder / f"federation-{scheme.helpers}.toml"
        every_pass = mock.patch("tenant.model.trips.MOST_ROWS", 1 << 20)
        with every_pass, recorder.recording_links():
            model = self._load(recorder, federation=chosen, **scheme.options)
            with backend_of(model):
                witness = Witness.install(model, recorder, self.public, truth)
                neighbour = neighbour_of(self.federation.executors[0], self._mallory, self.public)
                with neighbour as seen, torch.random.fork_rng(devices=[]), warnings.catch_warnings():
                    warnings.simplefilter("ignore", FutureWarning)  # a warning between peft and transformers
                    torch.manual_seed(workload.seed)
                    self._work(model, truth, workload)
                views = recorder.views(seen())
                games = {d: self._game(witness.inner, recorder, truth, d, workload) for d in DIRECTIONS}
        views = replace(views, executor=replace(views.executor, games=games))
        return Recording(scheme, views, truth)

    def record_chats(
        self,
        chats: Sequence[Chat],
        *,
        bucket: int = 1,
        ahead: int = 0,
        pace_s: float | None = None,
        forgets: int | None = None,
        computes: bool = True,
    ) -> list[list[Step]]:
        """Answer chats of these lengths through the endpoint's engine under `pad`, one after the other, and return the
        executor's steps for each. With a pace, a chat has as many steps as the longest one needs, so that the executor
        is also told when each begins. `forgets`: the chat whose bucket is ignored, a planted fault. `computes`: if
        False, the engine's steps are counted and not computed, so there are no times."""
        recorder = StepRecorder()
        model: Any = copy.deepcopy(self.public.model)
        if computes:
            model = self._load(recorder, federation=self.federation_path, masking="pad")
        tokenizer = AutoTokenizer.from_pretrained(self.store.path, trust_remote_code=False)
        limits = EngineLimits() if pace_s is None else EngineLimits(step_rows=bucket, pace_s=pace_s)
        longest = 4 + max(-(-chat.prompt // bucket) + chat.answer for chat in chats)
        traces = []
        with backend_of(model) if computes else nullcontext():
            packed = PackedModel(model) if computes else _Counting(model, recorder)
            engine = ContinuousEngine(packed, tokenizer, ahead=ahead, limits=limits)
            try:
                for i, chat in enumerate(chats):
                    begin = len(recorder.steps) if pace_s is None else (i + 1) * longest
                    recorder.wait_for(begin)
                    ended = threading.Event()
                    request = EngineRequest(
                        id=f"{i}",
                        client=f"{i}",  # so that no beginning of a prompt is cached
                        prompt=tuple(self.private_windows(1, chat.prompt, seed=i)[0].tolist()),
                        max_tokens=chat.answer,
                        bucket=1 if i == forgets else bucket,
                    )
                    engine.submit(request, partial(self._note_end, ended))
                    if not ended.wait(_START_S):
                        raise TimeoutError
                    if pace_s is not None:
                        recorder.wait_for(begin + longest + 1)  # the last step has ended
                    traces.append(recorder.steps[begin : None if pace_s is None else begin + longest])
            finally:
                engine.close()
        return traces

    @staticmethod
    def _note_end(ended: threading.Event, event: Event) -> None:
        if isinstance(event, Failed):
            raise event.error
        if isinstance(event, Done):
            ended.set()

    def _load(self, recorder: Wiretap, **options: Any) -> Any:
        remote = RemoteConfig(cache=self.cache, wiretap=recorder, **options)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # paper-pool warns about what this report shows
            kind, path = AutoModelForCausalLM, self.store.path
            return kind.from_pretrained(path, quantization_config=remote, trust_remote_code=False)

    def _generate(self, model: Any, prompts: Tensor, tokens: int) -> None:
        with torch.no_grad():
            model.generate(
                input_ids=prompts,
                attention_mask=torch.ones_like(prompts),
                max_new_tokens=tokens,
                min_new_tokens=tokens,
                do_sample=False,
                pad_token_id=self.public.pad_token,
            )

    def _work(self, model: Any, truth: Truth, workload: Workload) -> None:
        lora = LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=8, target_modules="all-linear")
        model = get_peft_model(model, lora)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
        model.train()
        for step in range(workload.steps):
            # padded to the longest; the labels of each sequence's first tokens (its prompt) are ignored
            ids = self.private_windows(workload.batch, workload.length, seed=step)
            lengths = workload.length - 4 * (torch.arange(workload.batch) % 4)
            padded = torch.arange(workload.length) >= lengths[:, None]
            labels = ids.masked_fill(padded, NO_LABEL)
            labels[:, :3] = NO_LABEL
            ids = ids.masked_fill(padded, self.public.pad_token)
            model(input_ids=ids, labels=labels, use_cache=False).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        model.eval()
        truth.updates = adapter_updates(model)
        truth.adapters = [p.detach().clone() for p in model.parameters() if p.requires_grad]
        for call in range(workload.generations):
            prompts = self.private_windows(workload.prompts, workload.prompt_length, seed=1000 + call)
            # one call is longer, so that attacks on lengths have something to find
            new = workload.new_tokens * (3 if call == 1 else 1)
            self._generate(model, prompts, new)
            truth.generated.append(new)
            truth.batches.append((workload.prompts, workload.prompt_length))

    def _game(self, backend: Any, recorder: Recorder, truth: Truth, direction: Direction, workload: Workload) -> Game:
        """Play the distinguishing game: the adversary chooses two rows, and the tenant sends one of them at random. The
        helpers' shares of the pads of these rows are computed from the logs of all helpers."""
        group = next((i for i, entry in enumerate(self.public.manifest.groups) if entry.composed is not None), 0)
        pair = self.public.vocabulary_rows[:2]
        if direction == BACKWARD:
            width = self.public.manifest.groups[group].stacked_outputs
            pair = torch.randn((2, width), generator=torch.Generator().manual_seed(0))
        word = expand(random_key(), first_row=0, rows=workload.game_rows, width=1)[:, 0]
        coins = word < 0
        half = workload.game_rows // 2
        backend.linear(group, direction, pair[coins.long()])
        views = recorder.views(NO_NEIGHBOUR)
        arrived = views.executor.exchanges[-1].rows
        truth.coins[direction] = coins[half:]
        numbers, pads = pad_rows(views.helpers, self.public, group, direction)
        shares = {}
        if len(pads):
            under = numbers[matching(arrived, pads)]
            for helper in views.helpers:
                own, rows = pad_rows([helper], self.public, group, direction)
                order = own.argsort()
                shares[helper.effects[0].helper] = rows[order[torch.searchsorted(own[order], under)]]
        return Game(arrived[:half], coins[:half], arrived[half:], shares)


class _Counting(PackedModel):
    """Counts rows and computes nothing."""

    def __init__(self, model: Any, recorder: StepRecorder) -> None:
        super().__init__(model)
        self._recorder = recorder

    def __call__(self, rows: Sequence[NextTokens]) -> list[Output]:
        self._recorder.add(sum(len(part.tokens) for part in rows), at=0.0)
        for part in rows:
            part.kv.grow(len(part.tokens))
        return [Output(torch.zeros(part.logits, self.vocabulary), torch.zeros(len(part.tokens), 1)) for part in rows]


_ASK_EVERY_S, _HEALTH_EVERY_S = 0.05, 0.5  # a report needs its own connection
_START_S = 120.0
_GROUP, _ROWS = 0, 4  # rows of each of the neighbour's requests


@contextmanager
def neighbour_of(executor: Peer, identity: Identity, public: Public) -> Iterator[Callable[[], NeighbourView]]:
    """A second tenant of the executor sends requests and reads health reports until the end. Yields its view so far."""
    seen: list[tuple[float, int]] = []
    own: list[Tensor] = []
    stop, ready = threading.Event(), threading.Event()
    context = client_context(certificate=identity.certificate, key=identity.key, pins=executor.pins)
    entry, digest = public.manifest.groups[_GROUP], public.manifest.digest
    weight = public.quantised(_GROUP).weight.to(torch.int32)

    def watch() -> None:
        started, due, last = time.monotonic(), 0.0, False
        with closing(Channel(executor, context=context, model_digest=digest, deadline_s=60)) as channel:
            while not last:
                last = stop.is_set()
                rows = expand(random_key(), first_row=0, rows=_ROWS, width=entry.inputs)
                request = wire.Execute(
                    nonce=fresh_nonce(), group=_GROUP, direction=FORWARD, arithmetic="ring", rows=_ROWS
                )
                answer = channel.request(request, mask(rows, UNMASKED_BY_CHOICE), outputs=entry.stacked_outputs)
                own.append((answer - rows @ weight.t()).double())
                if last or time.monotonic() >= due:
                    due = time.monotonic() + _HEALTH_EVERY_S
                    with executor.connection(context) as connection:
                        deadline = time.monotonic() + _START_S
                        connection.open(deadline)
                        report, _ = connection.expect(wire.HealthReport, wire.FetchHealth(), deadline=deadline)
                    seen.append((time.monotonic() - started, report.requests - len(own)))
                ready.set()
                stop.wait(_ASK_EVERY_S)

    thread = threading.Thread(target=watch, name="neighbour")
    thread.start()
    ready.wait(_START_S)
    try:
        yield lambda: NeighbourView(tuple(seen), torch.cat(own))
    finally:
        stop.set()
        thread.join(_START_S)
