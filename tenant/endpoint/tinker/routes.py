"""Tinker's HTTP routes. Requests of a training client and samples are answered at once with the id of a future.

What is refused gets status 400, 404 or 413, which the client shows at once; it would repeat 408, 409, 429 and 5xx for
minutes. So 429 means that waiting helps.
"""

import json
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, Body, Depends
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from tinker import types

from symbiosis_priv.checkpoints.checkpoint import hub_name
from symbiosis_priv.errors import SymbiosisError
from tenant.endpoint.api.errors import ApiError
from tenant.endpoint.api.service import Service, endpoint_of
from tenant.endpoint.engine.queued import Turn
from tenant.endpoint.options import Serving
from tenant.endpoint.tinker import sampling
from tenant.endpoint.tinker.checkpoints import EXTERNAL, FILES, SAMPLER, TYPES, WEIGHTS, Checkpoints, Place, Record
from tenant.endpoint.tinker.futures import Future, Futures
from tenant.endpoint.tinker.together import Together
from tenant.endpoint.tinker.training import Job, Run, Training
from tenant.endpoint.tinker.wire import Sizes, Steps, read_request, steps_of
from tenant.masking.backend import Backend
from tenant.tasks import Tasks

T = TypeVar("T")
Answer = dict[str, Any]


def client_of(http: Request) -> str:
    return endpoint_of(http).client(http)


Client = Annotated[str, Depends(client_of)]
Embedded = Annotated[T, Body(embed=True)]

SIGNED = "/tinker-files/"
_SESSION_S = 900.0  # without a heartbeat, of which the client sends one every 10 s
_SESSIONS = 64  # of one key
_SAMPLERS = 4096  # of one session
_SNAPSHOTS = 8  # of one training client; the oldest ones are deleted
_METADATA = 4096  # bytes
_TTL_S = 10 * 366 * 86400
_URL_S = 3600.0
_ADAM = ("learning_rate", "beta1", "beta2", "eps", "weight_decay", "grad_clip_norm")
_CLIENT = {
    "parallel_fwdbwd_chunks": False,  # so a later request arrives only after an earlier one was answered or refused
    "use_pyqwest_transport": False,
    "sample_max_concurrent_requests": 64,
    "fwdbwd_max_chunk_len": 256,
    "sample_cancel_enabled": True,
}


@dataclass(kw_only=True)
class _Session:
    id: str
    client: str
    heard: float = field(default_factory=time.monotonic)
    samplers: dict[str, Place | None] = field(default_factory=dict)


class Tinker:
    """Sessions, training clients, checkpoints and futures, and the routes to them. `own`: the key is made anew at every
    start, and its checkpoints have one owner nevertheless."""

    def __init__(self, service: Service, training: Training, checkpoints: Checkpoints, *, own: bool) -> None:
        self.service, self.training, self.checkpoints, self._own = service, training, checkpoints, own
        self.futures = Futures()
        self.sessions: dict[str, _Session] = {}
        self.files: dict[str, tuple[Place, float]] = {}
        training.sweep = self._sweep
        self.sizes = Sizes(
            vocabulary=service.model.get_input_embeddings().num_embeddings,
            tokens=min(service.context, training.longest),
        )

    def router(self) -> APIRouter:
        router = APIRouter(include_in_schema=False)
        checkpoint = "/training_runs/{run}/checkpoints/{kind}/{name}"
        for method, path, route in (
            ("GET", "/get_server_capabilities", self.capabilities),
            ("POST", "/client/{kind}", self.config),
            ("POST", "/telemetry", self.telemetry),
            ("POST", "/create_session", self.create_session),
            ("POST", "/session_heartbeat", self.heartbeat),
            ("POST", "/sessions/{session}/finish", self.finish),
            ("POST", "/create_model", self.create_model),
            ("POST", "/load_weights", self.load_weights),
            ("POST", "/get_info", self.get_info),
            ("POST", "/forward_backward", self.forward_backward),
            ("POST", "/optim_step", self.optim_step),
            ("POST", "/save_weights", self.save_weights),
            ("POST", "/save_weights_for_sampler", self.save_for_sampler),
            ("POST", "/save_weights_external", self.save_external),
            ("POST", "/create_sampling_session", self.create_sampling_session),
            ("GET", "/samplers/{sampler}", self.sampler),
            ("POST", "/asample", self.asample),
            ("POST", "/retrieve_future", self.retrieve_future),
            ("POST", "/cancel_future", self.cancel_future),
            ("GET", "/training_runs/{run}", self.training_run),
            ("GET", "/training_runs/{run}/checkpoints", self.run_checkpoints),
            ("GET", "/checkpoints", self.user_checkpoints),
            ("POST", "/weights_info", self.weights_info),
            ("DELETE", checkpoint, self.delete),
            ("PUT", checkpoint + "/ttl", self.ttl),
            ("GET", checkpoint + "/external_weights_urls", self.external_urls),
        ):
            router.add_api_route("/api/v1" + path, route, methods=[method], response_model=None)
        router.add_api_route("/api/v1/{rest:path}", self.others, methods=["GET", "POST", "PUT", "DELETE"])
        router.add_api_route(SIGNED + "{token}/{file}", self.download)
        return router

    # Service and sessions

    async def capabilities(self) -> Answer:
        model = {"model_name": self.service.name, "max_context_length": self.sizes.tokens}
        return {"supported_models": [{**model, "trainable": True, "sampleable": True}]}

    async def config(self, kind: str) -> Answer:
        return _CLIENT

    async def telemetry(self) -> Answer:
        return {"status": "accepted"}  # and dropped

    async def create_session(self, body: types.CreateSessionRequest, client: Client) -> Answer:
        if body.project_id is not None:
            raise ApiError(400, "there are no projects here; leave out project_id", param="project_id")
        session = _Session(id=secrets.token_hex(16), client=client)
        own = [one for one in self.sessions.values() if one.client == client]
        if len(own) >= _SESSIONS:
            self._end(min(own, key=lambda one: one.heard))
        self.sessions[session.id] = session
        return {"session_id": session.id}

    async def heartbeat(self, body: types.SessionHeartbeatRequest, client: Client) -> Answer:
        self._session(client, body.session_id)
        return {}

    async def finish(self, session: str, client: Client) -> Response:
        self._end(self._session(client, session))
        return Response(status_code=204)

    # Training

    async def create_model(self, body: types.CreateModelRequest, client: Client) -> Answer:
        self._check(body)
        if body.lora_config is None:
            raise ApiError(400, "only LoRA adapters are trained here; send lora_config", param="lora_config")
        run = self._new_run(client, body, body.lora_config)

        def work() -> Answer:
            self.training.create(run)
            return {"model_id": run.id}

        return self._submit(run, 0, work)

    async def load_weights(self, body: types.LoadWeightsRequest, client: Client) -> Answer:
        self._check(body)
        if body.weights_access_token is not None:
            raise ApiError(400, "keys do not share checkpoints; leave out weights_access_token")
        place = self.checkpoints.parse(self._owner(client), body.path)
        if body.model_id is not None:
            run, seq = self.training.run(client, body.model_id), body.seq_id
        else:
            run, seq = self._new_run(client, body, self.checkpoints.record(place).lora), 0

        def work() -> Answer:
            self.training.load(run, place, optimizer=body.optimizer)
            return {"path": place.uri, "model_id": run.id}

        return self._submit(run, seq, work)

    async def get_info(self, body: types.GetInfoRequest, client: Client) -> Answer:
        run, name = self.training.run(client, body.model_id), self.service.name
        source = Path(self.service.model.config.name_or_path)
        tokenizer = (hub_name(source) or (str(source),))[0]  # from the hub, or a folder of this machine
        data = {"arch": type(self.service.model).__name__, "model_name": name, "tokenizer_id": tokenizer}
        return {"model_data": data, "model_id": run.id, **_about(run.lora), "model_name": name}

    async def forward_backward(self, http: Request, client: Client) -> Answer:
        if "content-encoding" in http.headers:
            raise ApiError(400, "send the body without compression")
        message = read_request(await http.body())
        run = self.training.run(client, message.model_id)
        return self._submit(run, message.seq_id, steps=lambda: steps_of(message, self.sizes))

    async def optim_step(self, body: types.OptimStepRequest, client: Client) -> Answer:
        run, params = self.training.run(client, body.model_id), body.optim_params
        if not isinstance(params, types.AdamParams):
            raise ApiError(400, f"the optimizer {params.type[:40]!a} is not offered; use AdamParams")
        adam = {name: getattr(params, name) for name in _ADAM}
        return self._submit(run, body.seq_id, lambda: self.training.step(run, adam))

    async def save_weights(self, body: types.SaveWeightsRequest, client: Client) -> Answer:
        if body.path is None:
            body.path = f"step-{body.seq_id}"
        return self._save(client, body, WEIGHTS, lambda place: {"path": place.uri}, overwrite=body.overwrite)

    async def save_for_sampler(self, body: types.SaveWeightsForSamplerRequest, client: Client) -> Answer:
        session = self._session(client, body.model_id.partition(":")[0])
        if body.kind != "snapshot":
            raise ApiError(400, "kind: only snapshots are sampled from here", param="kind")

        def answer(place: Place) -> Answer:
            if body.path is not None:
                return {"path": place.uri}
            return self._add_sampler(session, body.sampling_session_seq_id or 0, place)

        return self._save(client, body, SAMPLER, answer)

    async def save_external(self, body: types.SaveWeightsExternalRequest, client: Client) -> Answer:
        if body.age_encryption_recipients:
            raise ApiError(400, "checkpoints leave this machine only by you; leave out age_encryption_recipients")
        size = self.checkpoints.size
        return self._save(client, body, EXTERNAL, lambda place: {"path": place.uri, "size_bytes": size(place)})

    # Sampling

    async def create_sampling_session(self, body: types.CreateSamplingSessionRequest, client: Client) -> Answer:
        session, place = self._session(client, body.session_id), None
        self._check(body)
        if body.model_path is not None:
            place = self.checkpoints.parse(self._owner(client), body.model_path)
            if (base := self.checkpoints.record(place).base_model) != self.service.name:
                raise ApiError(400, f"{place.uri} is of the model {base}, and this one is {self.service.name}")
        return self._add_sampler(session, body.sampling_session_seq_id, place)

    async def sampler(self, sampler: str, client: Client) -> Answer:
        place = self._sampler(client, sampler)
        path = None if place is None else place.uri
        return {"sampler_id": sampler, "base_model": self.service.name, "model_path": path}

    async def asample(self, body: types.SampleRequest, client: Client) -> Answer:
        if body.sampling_session_id is None or body.seq_id is None:
            raise ApiError(400, "send sampling_session_id and seq_id", param="sampling_session_id")
        place = self._sampler(client, body.sampling_session_id)
        id = f"{body.sampling_session_id}:{body.seq_id}"
        if self.futures.find(client, id) is None:
            task = None if place is None else sampling.task_of(place, self.training.tasks, self.checkpoints)
            requests = sampling.requests_of(body, self.service, client=client, task=task, id=id)
            kept, future = self.futures.room(client), Future(id)
            sampling.start(body, requests, self.service, future)
            kept[id] = future
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

    async def training_run(self, run: str, client: Client) -> Answer:
        live = next((one for one in self.training.runs(client) if one.id == run), None)
        found = [one for one in self.checkpoints.listed(self._owner(client)) if one[0].run == run]
        if live is None and not found:
            raise ApiError(404, "there is no such training run", code="not_found")
        last = {place.kind: self._described(place, record) for place, record in reversed(found)}  # the newest of each
        return {
            "training_run_id": run,
            "model_owner": "own",
            **_about(found[0][1].lora if live is None else live.lora),
            "base_model": self.service.name if live is not None else found[0][1].base_model,
            "last_request_time": _date(found[0][1].time if live is None else live.used),
            "last_checkpoint": last.get(WEIGHTS),
            "last_sampler_checkpoint": last.get(SAMPLER),
            "user_metadata": None if live is None else live.metadata,
        }

    async def run_checkpoints(self, run: str, client: Client) -> Answer:
        listed = self.checkpoints.listed(self._owner(client))
        return {"checkpoints": [self._described(*one) for one in listed if one[0].run == run]}

    async def user_checkpoints(self, client: Client, limit: int = 100, offset: int = 0) -> Answer:
        listed, limit, offset = self.checkpoints.listed(self._owner(client)), max(0, min(limit, 1000)), max(0, offset)
        cursor = {"offset": offset, "limit": limit, "total_count": len(listed)}
        return {"checkpoints": [self._described(*one) for one in listed[offset : offset + limit]], "cursor": cursor}

    async def weights_info(self, tinker_path: Embedded[str], client: Client) -> Answer:
        record = self.checkpoints.record(self.checkpoints.parse(self._owner(client), tinker_path))
        return {"base_model": record.base_model, **_about(record.lora)}

    async def delete(self, run: str, kind: str, name: str, client: Client) -> Response:
        self._delete(self.checkpoints.place(self._owner(client), run, kind, name))
        return Response(status_code=204)

    async def ttl(
        self, run: str, kind: str, name: str, client: Client, ttl_seconds: Embedded[int | None] = None
    ) -> Response:
        self.checkpoints.set_time(self.checkpoints.place(self._owner(client), run, kind, name), _expiry(ttl_seconds))
        return Response(status_code=204)

    async def external_urls(self, run: str, kind: str, name: str, http: Request, client: Client) -> Answer:
        place = self.checkpoints.place(self._owner(client), run, kind, name)
        self.checkpoints.record(place)
        token = secrets.token_urlsafe(32)
        self.files[token] = place, time.monotonic() + _URL_S
        base = str(http.base_url).rstrip("/") + SIGNED + token
        return {"urls": {file: f"{base}/{file}" for file in FILES}, "expires": _date(time.time() + _URL_S)}

    async def download(self, token: str, file: str) -> FileResponse:
        """The address is a secret that only the owner of the file was told."""
        place, until = self.files.get(token, (None, 0.0))
        if place is None or until < time.monotonic() or file not in FILES:
            raise ApiError(404, "this address is not valid, or no longer; ask for the urls again")
        return FileResponse(self.checkpoints.folder(place) / file)

    async def others(self, rest: str) -> Response:
        """What the service of Tinker's maker has and this endpoint has not."""
        raise ApiError(404, f"{rest[:200]!a} is not offered here", code="not_offered")

    # What several routes do

    def _owner(self, client: str) -> str:
        return "own" if self._own else client

    def _session(self, client: str, id: str | None) -> _Session:
        found = self.sessions.get(id or "")
        if found is None or found.client != client:
            raise ApiError(410, "there is no such session; the endpoint may have been started again", code="not_found")
        found.heard = time.monotonic()
        return found

    def _sampler(self, client: str, id: str) -> Place | None:
        session = self.sessions.get(id.partition(":")[0])
        if session is None or session.client != client or id not in session.samplers:
            raise ApiError(404, f"there is no sampling session {id[:80]!a}; create one again", code="not_found")
        return session.samplers[id]

    def _add_sampler(self, session: _Session, number: int, place: Place | None) -> Answer:
        id = f"{session.id}:sample:{number}"
        if len(session.samplers) >= _SAMPLERS and id not in session.samplers:
            del session.samplers[next(iter(session.samplers))]
        session.samplers[id] = place
        return {"sampling_session_id": id}

    def _new_run(self, client: str, body: Any, lora: types.LoraConfig) -> Run:
        id = f"{self._session(client, body.session_id).id}:train:{body.model_seq_id or 0}"
        known = (run for run in self.training.runs(client) if run.id == id)
        return next(known, Run(id, client, lora, _metadata(body.user_metadata)))

    def _check(self, body: Any) -> None:
        """Refuse other models and optimizers."""
        base, optimizer = getattr(body, "base_model", None), getattr(body, "optimizer_config", None)
        if base is not None and base != self.service.name:
            raise ApiError(400, f"there is no model {base[:80]!a}; this endpoint serves {self.service.name}")
        if optimizer is not None and optimizer.type != "adamw":
            raise ApiError(400, f"the optimizer {optimizer.type[:40]!a} is not offered; use Adam")

    def _submit(
        self,
        run: Run,
        seq: int | None,
        work: Callable[[], Answer] | None = None,
        *,
        steps: Callable[[], Steps] | None = None,
    ) -> Answer:
        """Queue a request of a training client, which the client may send twice."""
        number = run.last + 1 if seq is None else seq
        if self.futures.find(run.client, id := f"{run.id}:{number}") is None:
            job = Job(run, Future(id), work, None if steps is None else steps())
            kept = self.futures.room(run.client)
            self.training.submit(number, job)
            kept[id] = job.future
        return {"request_id": id, "model_id": run.id}

    def _save(
        self, client: str, body: Any, kind: str, answer: Callable[[Place], Answer], *, overwrite: bool = False
    ) -> Answer:
        run, snapshot = self.training.run(client, body.model_id), body.path is None
        name = f"snapshot-{body.seq_id}" if snapshot else body.path
        place = self.checkpoints.place(self._owner(client), run.id, kind, name)
        metadata = _metadata(getattr(body, "user_metadata", None))
        about = {"snapshot": snapshot, "expires": _expiry(body.ttl_seconds), "metadata": metadata}

        def work() -> Answer:
            self.training.save(run, place, optimizer=kind == WEIGHTS, overwrite=overwrite, **about)
            if snapshot:
                run.snapshots.append(place)
                for old in run.snapshots[:-_SNAPSHOTS]:
                    self._delete(old)
                    run.snapshots.remove(old)
            return answer(place)

        return self._submit(run, body.seq_id, work)

    def _described(self, place: Place, record: Record) -> Answer:
        return {
            "checkpoint_id": f"{place.kind}/{place.name}",
            "checkpoint_type": TYPES[place.kind],
            "time": _date(record.time),
            "tinker_path": place.uri,
            "size_bytes": self.checkpoints.size(place),
            "user_metadata": record.metadata,
            "expires_at": _date(record.expires),
        }

    def _end(self, session: _Session) -> None:
        """End a session and its training clients."""
        self.sessions.pop(session.id, None)
        for run in self.training.runs(session.client):
            if run.id.startswith(session.id):
                self.training.end(run)

    def _delete(self, place: Place) -> None:
        """Delete a checkpoint. Raises `ApiError` if requests use it."""
        tasks, task = self.training.tasks, sampling.task_name(place, self.checkpoints.record(place, expired=True))
        try:
            if task in tasks:
                tasks.unregister(task)
        except SymbiosisError as error:
            raise ApiError(400, f"{place.uri} is in use; delete it later") from error
        self.checkpoints.delete(place)

    def _sweep(self) -> None:
        now = time.monotonic()
        for session in list(self.sessions.values()):
            if now - session.heard > _SESSION_S:
                self._end(session)
        for place, record in list(self.checkpoints.all()):
            try:
                if record.expired:
                    self._delete(place)
            except ApiError:  # samples use it
                continue
        self.files = {token: one for token, one in self.files.items() if one[1] > now}


@contextmanager
def opened(
    service: Service, tasks: Tasks, backend: Backend, turn: Turn, *, options: Serving, clients: int
) -> Iterator[APIRouter]:
    """Context manager: the routes. Raises `ConfigError` and `StorageError`: the folder cannot be used."""
    assert options.tinker is not None
    with ExitStack() as running:
        checkpoints = Checkpoints(options.tinker, owners=clients)
        running.callback(checkpoints.close)
        Together(service.model, backend, turn)
        training = Training(service.model, tasks, checkpoints, name=service.name, clients=clients)
        running.callback(training.close)
        yield Tinker(service, training, checkpoints, own=options.api_key_file is None).router()


def _about(lora: types.LoraConfig) -> Answer:
    return {"is_lora": True, "lora_rank": lora.rank, **lora.model_dump(exclude={"rank", "seed"})}


def _date(seconds: float | None) -> str | None:
    return None if seconds is None else datetime.fromtimestamp(seconds, UTC).isoformat()


def _expiry(seconds: int | None) -> float | None:
    if seconds is not None and not 0 < seconds <= _TTL_S:
        raise ApiError(400, "ttl_seconds is from 1 to ten years", param="ttl_seconds")
    return None if seconds is None else time.time() + seconds


def _metadata(given: Any) -> dict[str, str] | None:
    found = None if given is None else {str(key): str(value) for key, value in given.items()}
    if len(json.dumps(found)) > _METADATA:
        raise ApiError(400, f"user_metadata exceeds {_METADATA:,} bytes", param="user_metadata")
    return found
