"""A real run to attack: a base model, an executor and three helpers behind TLS, and a tenant that trains and generates.

    with Lab(folder) as lab:
        recording = lab.record(schemes.PAD, WORKLOAD)

The base model is a Llama of three blocks, pretrained for seconds on public text. The tenant's text is private. Every
product is sent over a TLS socket, and the recorder is at the tenant's end of it.
"""

import copy
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self
from unittest import mock

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from provider.config.schema import (
    ExecutorConfig,
    Limits,
    ModelConfig,
    ProviderConfig,
    RelayConfig,
    RelayTarget,
    TlsConfig,
)
from provider.relay.blocks import BlockStore, KeptBlock
from provider.serve import Provider
from symbiosis_priv.arithmetic.keystream import expand, random_key
from symbiosis_priv.arithmetic.ring import BACKWARD, DIRECTIONS, Direction
from symbiosis_priv.certificates.issuing import create_authority, issue
from symbiosis_priv.certificates.reading import Kind
from symbiosis_priv.checkpoints.weights import WeightStore
from symbiosis_priv.federation import federation_text, load_federation
from symbiosis_priv.harness.base_model import Pretraining, make_base_model, private_text, public_text
from symbiosis_priv.network import wire
from symbiosis_priv.network.tls import TenantIdentity
from tenant import RemoteConfig, backend_of
from threat_model.attacks.collusion import matching, pad_rows
from threat_model.evidence.neighbour import Neighbour
from threat_model.evidence.public import Public, alone
from threat_model.evidence.schemes import AttackedScheme
from threat_model.evidence.truth import NO_LABEL, Truth, Witness, adapter_updates
from threat_model.evidence.views import NO_NEIGHBOUR, Game, HelperView, Recorder, Views


@dataclass(frozen=True, kw_only=True)
class Workload:
    """The tenant's work during a recording.

    Args:
        steps: LoRA training steps on `[batch, length]` tokens.
        generations: calls of `generate` on `[prompts, prompt_length]` tokens.
        game_rows: rows of the distinguishing game, per direction.
    """

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
    """The recorded run of one scheme."""

    scheme: AttackedScheme
    views: Views
    truth: Truth
    seconds: float


class Lab:
    """A context manager that runs providers, and records what each party sees.

    Args:
        folder: an empty folder for the checkpoint, keys and caches.
        tied: True if the LM head is the embedding (and therefore stays with the tenant).
        experts: experts of every block; 0 for a model without experts.
        helpers: number of helpers to start, 1 to 3. Each scheme states how many it needs.

    Attributes:
        relayed: a federation file with relay and one helper.
        one_company: a federation file whose only helper belongs to the executor's company. No tenant may use it.
    """

    def __init__(self, folder: Path, *, tied: bool = False, experts: int = 0, helpers: int = 3) -> None:
        self.folder = folder
        self._tied, self._experts, self._helpers = tied, experts, helpers
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        recipe = Pretraining(
            steps=60,
            window=48,
            sentences=1500,
            vocab=320,
            width=64,
            blocks=3,
            experts=self._experts,
            tied=self._tied,
        )
        checkpoint = make_base_model(self.folder / "model", recipe=recipe)
        model = AutoModelForCausalLM.from_pretrained(checkpoint, trust_remote_code=False)
        model.requires_grad_(False)
        tokenizer = AutoTokenizer.from_pretrained(checkpoint, trust_remote_code=False)
        self.store = WeightStore(checkpoint, cache=self.folder / "cache")
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
        try:
            self._start_providers(checkpoint)
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _start_providers(self, checkpoint: Path) -> None:
        keys = self.folder / "keys"
        authority = create_authority(keys)
        issue(keys, authority=authority, kind=Kind.TENANT, name="alice")
        self._mallory = issue(keys, authority=authority, kind=Kind.TENANT, name="mallory")
        self._federations: list[Path] = []  # federation files by the number of helpers
        entries: list[dict[str, object]] = []

        def write(name: str, providers: list[dict[str, object]], **tables: Any) -> Path:
            path, digest = self.folder / f"federation-{name}.toml", self.store.manifest().digest
            text = federation_text(
                providers, digest=digest, certificate="keys/alice.pem", key="keys/alice.key", **tables
            )
            path.write_text(text)
            return path

        roles: dict[str, wire.Role] = {"executor": "executor"}
        roles |= dict.fromkeys(("helper", "second-helper", "third-helper")[: self._helpers], "helper")
        identities = {name: issue(keys, authority=None, kind=Kind.PROVIDER, name=name) for name in roles}
        helpers = [name for name, role in roles.items() if role == "helper"]
        relay = RelayConfig(helpers=tuple(identities[name].certificate for name in helpers))
        for name, role in roles.items():
            identity = identities[name]
            provider = Provider(
                ProviderConfig(
                    name=name,
                    listen="localhost:0",
                    roles=(role,),
                    log_level="warning",
                    model=ModelConfig(checkpoint=str(checkpoint), cache=self.folder / "cache"),
                    tls=TlsConfig(
                        certificate=identity.certificate, key=identity.key, tenant_authority=authority.certificate
                    ),
                    # hundreds of sessions are opened, and each would wait for its share of handshakes
                    limits=Limits(handshake_share=1.0, handshake_share_serving=1.0),
                    executor=ExecutorConfig(float_path=True),
                    relay=relay,
                )
            )
            self._stack.enter_context(provider)
            if role == "executor":
                to = RelayTarget(address=provider.address, certificate=identity.certificate)
                relay = RelayConfig(to=(to,))
            entries.append(
                {
                    "name": name,
                    "operator": f"operator of the {name}",
                    "role": role,
                    "address": provider.address,
                    "certificate": f"keys/{name}.pem",
                }
            )
            self._federations.append(write(f"{len(self._federations)}", entries))
        self.federation_path = self._federations[1]
        self.relayed = write("relay", entries[:2], pads={"relay": True})
        company = {"Holding SE": ["executor", "helper"]}
        self.one_company = write("company", entries[:2], pads={"helpers": 1}, companies=company)
        self.federation = load_federation(self.federation_path)

    def private_windows(self, count: int, length: int, *, seed: int) -> Tensor:
        """Pieces of the tenant's text, int64 `[count, length]`."""
        starts = torch.randint(len(self._private) - length, (count,), generator=torch.Generator().manual_seed(seed))
        return torch.stack([self._private[s : s + length] for s in starts.tolist()])

    def record(self, scheme: AttackedScheme, workload: Workload, *, federation: Path | None = None) -> Recording:
        """Fine-tune and generate under a scheme, and record every party's view.

        Args:
            federation: a federation file to use instead of the one with the scheme's number of helpers.
        """
        recorder = Recorder()
        with _deposits(recorder):
            return self._record(scheme, workload, recorder, federation)

    def _record(
        self, scheme: AttackedScheme, workload: Workload, recorder: Recorder, federation: Path | None
    ) -> Recording:
        started, truth = time.monotonic(), Truth(steps=workload.steps)
        config = RemoteConfig(
            federation=federation or (self.relayed if scheme.relay else self._federations[scheme.helpers]),
            cache=self.folder / "cache",
            wiretap=recorder,
            **scheme.options,
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # paper-pool warns about what this report shows
            model: Any = AutoModelForCausalLM.from_pretrained(
                self.store.path, quantization_config=config, trust_remote_code=False
            )
        backend = backend_of(model)
        try:
            witness = Witness.install(model, recorder, self.public, truth)
            neighbour = Neighbour(self.federation.executors[0], self._mallory, self.public)
            with torch.random.fork_rng(devices=[]), neighbour.watching(), warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)  # a warning between peft and transformers
                torch.manual_seed(workload.seed)
                self._work(model, truth, workload)
            views = recorder.views(neighbour.view())
            games = {d: self._game(witness.inner, recorder, truth, d, workload) for d in DIRECTIONS}
            views = replace(views, executor=replace(views.executor, games=games))
        finally:
            backend.close()
        return Recording(scheme, views, truth, time.monotonic() - started)

    def _work(self, model: Any, truth: Truth, workload: Workload) -> None:
        lora = LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=8, target_modules="all-linear")
        model = get_peft_model(model, lora)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
        model.train()
        for step in range(workload.steps):
            ids, labels = self._batch(workload, step)
            model(input_ids=ids, labels=labels, use_cache=False).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        model.eval()
        truth.updates = adapter_updates(model)
        held_out = self.private_windows(32, workload.length, seed=3)
        truth.loss = lambda updates: _loss(self.public.model, held_out, updates)
        for call in range(workload.generations):
            prompts = self.private_windows(workload.prompts, workload.prompt_length, seed=1000 + call)
            # one call is longer, so that attacks on lengths have something to find
            new = workload.new_tokens * (3 if call == 1 else 1)
            with torch.no_grad():
                model.generate(
                    input_ids=prompts,
                    attention_mask=torch.ones_like(prompts),
                    max_new_tokens=new,
                    min_new_tokens=new,
                    do_sample=False,
                    pad_token_id=self.public.pad_token,
                )
            truth.generated.append(new)
            truth.batches.append((workload.prompts, workload.prompt_length))
            truth.prompts.append(prompts)

    def _batch(self, workload: Workload, step: int) -> tuple[Tensor, Tensor]:
        """Tokens and labels `[b, t]`: padded to the longest. The labels of each sequence's first tokens (its prompt)
        are ignored."""
        ids = self.private_windows(workload.batch, workload.length, seed=step)
        lengths = workload.length - 4 * (torch.arange(workload.batch) % 4)
        labels = ids.clone()
        labels[:, :3] = NO_LABEL
        padded = torch.arange(workload.length) >= lengths[:, None]
        return ids.masked_fill(padded, self.public.pad_token), labels.masked_fill(padded, NO_LABEL)

    def _game(self, backend: Any, recorder: Recorder, truth: Truth, direction: Direction, workload: Workload) -> Game:
        """Play the distinguishing game: the adversary chooses two rows, and the tenant sends one of them at random."""
        group = 0
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
        shares = self._shares(views.helpers, arrived, group, direction)
        return Game(arrived[:half], coins[:half], arrived[half:], shares)

    def _shares(
        self, helpers: Sequence[HelperView], arrived: Tensor, group: int, direction: Direction
    ) -> dict[str, Tensor]:
        """Each helper's share of the pads of some rows, computed from the logs of all helpers."""
        numbers, pads = pad_rows(helpers, self.public, group, direction)
        if not len(pads):
            return {}
        under = numbers[matching(arrived, pads)]
        shares = {}
        for helper in helpers:
            own, rows = pad_rows([helper], self.public, group, direction)
            order = own.argsort()
            shares[helper.effects[0].helper] = rows[order[torch.searchsorted(own[order], under)]]
        return shares


@contextmanager
def _deposits(recorder: Recorder) -> Iterator[None]:
    """Record the blocks that executors of this process keep. Executors wait longer here, for busy machines."""
    keep = BlockStore.keep

    def record(store: BlockStore, tenant: TenantIdentity, block: KeptBlock, payload: memoryview) -> None:
        recorder.deposited(block.header, payload)
        keep(store, tenant, block, payload)

    wait = mock.patch("provider.gateway.connection._BLOCK_WAIT_S", 20.0)
    with wait, mock.patch.object(BlockStore, "keep", record):
        yield


def _loss(base: Any, ids: Tensor, updates: Mapping[str, Tensor]) -> float:
    model = copy.deepcopy(base)
    with torch.no_grad():
        for name, update in updates.items():
            model.get_submodule(name).weight.add_(update)
        return float(model(input_ids=ids, labels=ids).loss)
