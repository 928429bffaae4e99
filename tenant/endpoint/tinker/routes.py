"""Tinker's HTTP routes. Requests of a training client and samples are answered at once with the id of a future.

What is refused gets status 400, 404 or 413, which the client shows at once; it would repeat 408, 409, 429 and 5xx for
minutes. So 429 means that waiting helps. Errors of futures carry their status in their text.
"""

import secrets
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, Body, Depends, Query
from pydantic import AfterValidator, BaseModel
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from tinker import types

from symbiosis_priv.checkpoints.checkpoint import hub_name
from tenant.endpoint.api.errors import ApiError
from tenant.endpoint.api.service import Service, endpoint_of
from tenant.endpoint.engine.queued import Turn
from tenant.endpoint.options import Serving
from tenant.endpoint.tinker import sampling
from tenant.endpoint.tinker.checkpoints import EXTERNAL, FILES, SAMPLER, SNAPSHOTS, TYPES, WEIGHTS, Checkpoints, Place
from tenant.endpoint.tinker.futures import Futures
from tenant.endpoint.tinker.together import Together
from tenant.endpoint.tinker.training import Job, Run, Training
from tenant.endpoint.tinker.wire import examples_of, read_request
from tenant.masking.backend import Backend
from tenant.tasks import Tasks
from tenant.training.output import claimed

T = TypeVar("T", bound=BaseModel)
Answer = dict[str, Any]

SIGNED = "/tinker-files/"
_SESSION_S = 120.0  # without a heartbeat, of which the client sends one every 10 s
_TTL_S = 10 * 366 * 86400
_URL_S = 3600
_COPIES = 8  # bytes of memory for each byte of a request to train: as a message, as tensors, and its result
_CLIENT = {
    "parallel_fwdbwd_chunks": False,  # so a later request arrives only after an earlier one was answered or refused
    "use_pyqwest_transport": False,
    "sample_max_concurrent_requests": 64,
    "fwdbwd_max_chunk_len": 256,
    "sample_cancel_enabled": True,
}
_NOT_OFFERED = {
    "age_encryption_recipients": "checkpoints leave this machine only by you",
    "kind": "samples come from snapshots",
    "optimizer_config": "the optimizer is Adam",
    "overwrite": "delete the checkpoint first",
    "project_id": "there are no projects",
    "prompt_alt_tokens_k": "sample with top_k",
    "prompt_logprobs_last_n": "all tokens of the prompt have log probabilities",
    "record_stability_info": "there is no StableReinforce",
    "target_prompt_logprobs": "use topk_prompt_logprobs",
    "weights_access_token": "keys do not share checkpoints",
}
"""Fields of bodies that the service of Tinker's maker has, and what to do here. Routes that are not here get 404."""
_NOTHING: tuple[Any, ...] = (None, False, 0, "snapshot", [], types.AdamOptimizerConfig())


def _offered(body: T) -> T:
    for name, instead in _NOT_OFFERED.items():
        if getattr(body, name, None) not in _NOTHING:
            raise ApiError(400, f"{name} is not offered here: {instead}", code="not_offered", param=name)
    return body


Offered = Annotated[T, AfterValidator(_offered)]


def _client(http: Request) -> str:
    return endpoint_of(http).client(http)


Client = Annotated[str, Depends(_client)]


@dataclass(kw_only=True)
class _Session:
    id: str
    client: str
    heard: float = field(default_factory=time.monotonic)
    samplers: dict[str, Place | None] = field(default_factory=dict)


class Tinker:
    """Sessions, training clients, checkpoints and futures, and the routes to them; those that read the disk run in
    threads."""

    def __init__(self, service: Service, training: Training, checkpoints: Checkpoints) -> None:
        self.service, self.training, self.checkpoints = service, training, checkpoints
        self.futures = Futures()
        self.sessions: dict[str, _Session] = {}
        self.longest = min(service.context, training.longest)
        self._shown: dict[str, tuple[Place, float]] = {}  # what can be downloaded, and until when, by a secret

    def router(self) -> APIRouter:
        router = APIRouter(include_in_schema=False)
        for post in (
            *(self.telemetry, self.create_session, self.session_heartbeat, self.create_model, self.load_weights),
            *(self.get_info, self.forward_backward, self.optim_step, self.save_weights, self.save_weights_for_sampler),
            *(self.save_weights_external, self.create_sampling_session, self.asample, self.retrieve_future),
            *(self.cancel_future, self.weights_info),
        ):
            router.add_api_route(f"/api/v1/{post.__name__}", post, methods=["POST"], response_model=None)
        checkpoints = "/training_runs/{run}/checkpoints"
        for method, path, route in (
            ("GET", "/get_server_capabilities", self.capabilities),
            ("POST", "/client/{kind}", self.config),
            ("POST", "/sessions/{session}/finish", self.finish),
            ("GET", "/samplers/{sampler}", self.sampler),
            ("GET", "/checkpoints", self.user_checkpoints),
            ("GET", checkpoints, self.run_checkpoints),
            ("DELETE", checkpoints + "/{kind}/{name}", self.delete),
            ("GET", checkpoints + "/" + EXTERNAL + "/{name}/external_weights_urls", self.external_urls),
        ):
            router.add_api_route("/api/v1" + path, route, methods=[method], response_model=None)
        router.add_api_route("/api/v1/{rest:path}", self.others, methods=["GET", "POST", "PUT", "DELETE"])
        router.add_api_route(SIGNED + "{secret}/{file}", self.download)
        return router

    # Service and sessions

    async def capabilities(self) -> Answer:
        model = {"model_name": self.service.name, "max_context_length": self.longest}
        return {"supported_models": [{**model, "trainable": True, "sampleable": True}]}

    async def config(self, kind: str) -> Answer:
        return _CLIENT

    async def telemetry(self) -> Answer:
        return {"status": "accepted"}  # and dropped

    async def create_session(self, body: Offered[types.CreateSessionRequest], client: Client) -> Answer:
        session = _Session(id=secrets.token_hex(16), client=client)
        self.sessions[session.id] = session
        return {"session_id": session.id}

    async def session_heartbeat(self, body: types.SessionHeartbeatRequest, client: Client) -> Answer:
        self._session(client, body.session_id)
        return {}

    async def finish(self, session: str, client: Client) -> Response:
        if session in self.sessions:  # it may have ended because the client was silent
            self._end(self._session(client, session))
        return Response(status_code=204)

    # Training

    async def create_model(self, body: Offered[types.CreateModelRequest], client: Client) -> Answer:
        self._check(body.base_model)
        if body.lora_config is None:
            raise ApiError(400, "only LoRA adapters are trained here; send lora_config", param="lora_config")
        run = self._new_run(client, body.session_id, body.model_seq_id, body.lora_config)

        def work() -> Answer:
            self.training.create(run)
            return {"model_id": run.id}

        return self._submit(0, Job(run, work))

    async def load_weights(self, body: Offered[types.LoadWeightsRequest], client: Client) -> Answer:
        self._check(body.base_model)
        place = self.checkpoints.parse(client, body.path)
        if body.model_id is not None:
            run, seq = self.training.run(client, body.model_id), body.seq_id
        else:
            lora, seq = self.checkpoints.record(place).lora, 0
            run = self._new_run(client, body.session_id, body.model_seq_id, lora)

        def work() -> Answer:
            self.training.load(run, place, optimizer=body.optimizer)
            return {"path": place.uri, "model_id": run.id}

        return self._submit(seq, Job(run, work))

    async def get_info(self, body: types.GetInfoRequest, client: Client) -> Answer:
        run, name = self.training.run(client, body.model_id), self.service.name
        source = Path(self.service.model.config.name_or_path)
        tokenizer = (hub_name(source) or (str(source),))[0]  # from the hub, or a folder of this machine
        data = {"arch": type(self.service.model).__name__, "model_name": name, "tokenizer_id": tokenizer}
        return {"model_data": data, "model_id": run.id, **_about(run.lora), "model_name": name}

    async def forward_backward(self, http: Request, client: Client) -> Answer:
        message = read_request(body := await http.body())
        run = self.training.run(client, message.model_id)
        examples = examples_of(message, vocabulary=self.training.vocabulary, longest=self.longest)
        job = Job(run, examples=examples, backward=not message.forward_only)
        return self._submit(message.seq_id, job, size=_COPIES * len(body))

    async def optim_step(self, body: types.OptimStepRequest, client: Client) -> Answer:
        run, adam = self.training.run(client, body.model_id), body.optim_params
        if not isinstance(adam, types.AdamParams):
            raise ApiError(400, f"the optimizer {adam.type[:40]!a} is not offered; use AdamParams")
        return self._submit(body.seq_id, Job(run, lambda: self.training.step(run, adam)))

    async def save_weights(self, body: Offered[types.SaveWeightsRequest], client: Client) -> Answer:
        return self._save(client, body, WEIGHTS, f"step-{body.seq_id}" if body.path is None else body.path)

    async def save_weights_for_sampler(
        self, body: Offered[types.SaveWeightsForSamplerRequest], client: Client
    ) -> Answer:
        kind, name = (SNAPSHOTS, str(body.seq_id)) if body.path is None else (SAMPLER, body.path)
        return self._save(client, body, kind, name)

    async def save_weights_external(self, body: Offered[types.SaveWeightsExternalRequest], client: Client) -> Answer:
        return self._save(client, body, EXTERNAL, body.path)

    # Sampling

    async def create_sampling_session(self, body: types.CreateSamplingSessionRequest, client: Client) -> Answer:
        session, place = self._session(client, body.session_id), None
        self._check(body.base_model)
        if body.model_path is not None:
            place = self.checkpoints.parse(client, body.model_path)
            self._check(self.checkpoints.record(place).base_model)
        return self._add_sampler(session, body.sampling_session_seq_id, place)

    async def sampler(self, sampler: str, client: Client) -> Answer:
        place = self._sampler(client, sampler)
        return {"sampler_id": sampler, "base_model": self.service.name, "model_path": place and place.uri}

    async def asample(self, body: Offered[types.SampleRequest], http: Request, client: Client) -> Answer:
        place = self._sampler(client, body.sampling_session_id or "")
        if self.futures.find(client, id := f"{body.sampling_session_id}:{body.seq_id}") is None:
            task = None if place is None else self.checkpoints.task(place)
            requests = await sampling.requests_of(body, self.service, client=client, task=task)
            future = self.futures.new(client, id, sampling.size_of(body, requests))
            sampling.start(body, requests, endpoint_of(http), future)
            self.futures.keep(client, future)
        return {"request_id": id, "sample_sequence_ids": [f"{id}:{n}" for n in range(body.num_samples)]}

    # Futures

    async def retrieve_future(self, body: types.FutureRetrieveRequest, client: Client) -> Response:
        if (found := self.futures.find(client, body.request_id)) is None:  # the client sends the request again
            raise ApiError(410, "there is no such request, or no longer; the endpoint may have been started again")
        return await found.wait()

    async def cancel_future(self, body: types.FutureRetrieveRequest, client: Client) -> Response:
        if (found := self.futures.find(client, body.request_id)) is not None:
            found.cancel()
        return Response(status_code=204)

    # Checkpoints

    def run_checkpoints(self, run: str, client: Client) -> Answer:
        return {"checkpoints": self._listed(client, run)}

    def user_checkpoints(
        self, client: Client, limit: Annotated[int, Query(ge=0)] = 100, offset: Annotated[int, Query(ge=0)] = 0
    ) -> Answer:
        listed = self._listed(client)
        cursor = {"offset": offset, "limit": limit, "total_count": len(listed)}
        return {"checkpoints": listed[offset : offset + limit], "cursor": cursor}

    def weights_info(self, tinker_path: Annotated[str, Body(embed=True)], client: Client) -> Answer:
        record = self.checkpoints.record(self.checkpoints.parse(client, tinker_path))
        return {"base_model": record.base_model, **_about(record.lora)}

    def delete(self, run: str, kind: str, name: str, client: Client) -> Response:
        self.checkpoints.delete(self.checkpoints.place(client, run, kind, name))
        return Response(status_code=204)

    def external_urls(self, run: str, name: str, http: Request, client: Client) -> Answer:
        place, now, secret = self.checkpoints.place(client, run, EXTERNAL, name), time.time(), secrets.token_urlsafe(32)
        self.checkpoints.record(place)
        for old in [key for key, (_, until) in self._shown.copy().items() if until < now]:
            del self._shown[old]
        self._shown[secret] = place, now + _URL_S
        base = f"{http.base_url}".rstrip("/") + SIGNED + secret
        return {"urls": {file: f"{base}/{file}" for file in FILES}, "expires": int(now + _URL_S)}

    def download(self, secret: str, file: str) -> FileResponse:
        """The address is a secret that only the owner of the file was told."""
        place, until = self._shown.get(secret, (None, 0.0))
        if place is None or until < time.time() or file not in FILES:
            raise ApiError(404, "this address is not valid, or no longer; ask for the urls again")
        self.checkpoints.record(place)
        return FileResponse(self.checkpoints.folder(place) / file)

    async def others(self, rest: str) -> Response:
        raise ApiError(404, f"{rest[:200]!a} is not offered here", code="not_offered")

    # What several routes do

    def _session(self, client: str, id: str | None) -> _Session:
        found = self.sessions.get(id or "")
        if found is None or found.client != client:
            raise ApiError(410, "there is no such session; the endpoint may have been started again", code="not_found")
        found.heard = time.monotonic()
        for other in [one for one in self.sessions.values() if found.heard - one.heard > _SESSION_S]:
            self._end(other)
        return found

    def _end(self, session: _Session) -> None:
        """End a session, its training clients and its samples. The results that are there stay."""
        del self.sessions[session.id]
        for run in self.training.runs(session.client):
            if run.id.startswith(session.id):
                self.training.end(run)
        self.futures.cancel(session.client, f"{session.id}:sample:")

    def _sampler(self, client: str, id: str) -> Place | None:
        session = self.sessions.get(id.partition(":")[0])
        if session is None or session.client != client or id not in session.samplers:
            raise ApiError(404, f"there is no sampling session {id[:80]!a}; create one again", code="not_found")
        return session.samplers[id]

    def _add_sampler(self, session: _Session, number: int, place: Place | None) -> Answer:
        session.samplers[id := f"{session.id}:sample:{number}"] = place
        return {"sampling_session_id": id}

    def _check(self, base: str | None) -> None:
        if base not in (None, self.service.name):
            raise ApiError(400, f"there is no model {base[:80]!a}; this endpoint serves {self.service.name}")

    def _new_run(self, client: str, session: str | None, number: int | None, lora: types.LoraConfig) -> Run:
        id = f"{self._session(client, session).id}:train:{number or 0}"
        return next((run for run in self.training.runs(client) if run.id == id), Run(id, client, lora))

    def _submit(self, seq: int | None, job: Job, *, size: int = 1024) -> Answer:
        """Queue a request of a training client, which the client may send twice."""
        run, number = job.run, job.run.last + 1 if seq is None else seq
        if self.futures.find(run.client, id := f"{run.id}:{number}") is None:
            job.future = self.futures.new(run.client, id, size)
            self.training.submit(number, job)
            self.futures.keep(run.client, job.future)
        return {"request_id": id, "model_id": run.id}

    def _save(self, client: str, body: Any, kind: str, name: str) -> Answer:
        run, ttl = self.training.run(client, body.model_id), body.ttl_seconds
        if ttl is not None and not 0 < ttl <= _TTL_S:
            raise ApiError(400, "ttl_seconds is from 1 to ten years", param="ttl_seconds")
        expires = None if ttl is None else time.time() + ttl
        place = self.checkpoints.place(client, run.id, SAMPLER, name)._replace(kind=kind)
        session = self._session(client, run.id.partition(":")[0])

        def work() -> Answer:
            self.training.save(run, place, expires=expires)
            if kind != SNAPSHOTS:
                return {"path": place.uri}
            return self._add_sampler(session, body.sampling_session_seq_id or 0, place)

        return self._submit(body.seq_id, Job(run, work))

    def _listed(self, client: str, run: str | None = None) -> list[types.Checkpoint]:
        """Return the checkpoints of a key, or of one of its runs, the newest one first."""
        every = self.checkpoints.all(self.checkpoints.owner(client))
        found = [one for one in every if one[0].kind in TYPES and run in (None, one[0].run)]
        return [
            types.Checkpoint(
                checkpoint_id=f"{place.kind}/{place.name}",
                checkpoint_type=TYPES[place.kind],
                time=datetime.fromtimestamp(record.time, UTC),
                tinker_path=place.uri,
                size_bytes=self.checkpoints.size(place),
                expires_at=None if record.expires is None else datetime.fromtimestamp(record.expires, UTC),
            )
            for place, record in sorted(found, key=lambda one: one[1].time, reverse=True)
        ]


@contextmanager
def opened(
    service: Service, tasks: Tasks, backend: Backend, turn: Turn, *, options: Serving, clients: int
) -> Iterator[APIRouter]:
    """Context manager: the routes. Raises `ConfigError` and `StorageError`: the folder cannot be used."""
    assert options.tinker is not None
    with ExitStack() as running:
        running.enter_context(claimed(options.tinker, option="--tinker"))
        checkpoints = Checkpoints(options.tinker, tasks, owners=clients, one=options.api_key_file is None)
        together = Together(service.model, backend, turn)
        training = Training(service.model, tasks, checkpoints, together, name=service.name, clients=clients)
        running.callback(training.close)
        yield Tinker(service, training, checkpoints).router()


def _about(lora: types.LoraConfig) -> Answer:
    return {"is_lora": True, "lora_rank": lora.rank, **lora.model_dump(exclude={"rank", "seed"})}
