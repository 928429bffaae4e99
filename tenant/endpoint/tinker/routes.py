"""Tinker's HTTP routes. Requests of a training client and samples are answered at once with the id of a future.

What is refused gets status 400, 404 or 413, which the client shows at once; it would repeat 408, 409, 429 and 5xx for
minutes. So 429 means that waiting helps.
"""

import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
from fastapi import APIRouter, Body
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from tinker import types

from symbiosis_priv.checkpoints.checkpoint import hub_name
from symbiosis_priv.errors import SymbiosisError
from tenant.endpoint.api.errors import ApiError
from tenant.endpoint.api.service import Service, endpoint_of
from tenant.endpoint.tinker import sampling
from tenant.endpoint.tinker.checkpoints import (
    EXTERNAL,
    FILES,
    SAMPLER,
    TYPES,
    WEIGHTS,
    Checkpoints,
    Lora,
    Place,
    Record,
)
from tenant.endpoint.tinker.futures import Future, Futures
from tenant.endpoint.tinker.training import Job, Run, Training
from tenant.endpoint.tinker.wire import Sizes, read_request, steps_of

T = TypeVar("T")
Embedded = Annotated[T, Body(embed=True)]

_SESSION_S = 900.0  # without a heartbeat, of which the client sends one every 10 s
_SESSIONS = 64  # of one key
_SAMPLERS = 4096  # of one session
_SNAPSHOTS = 8  # of one training client; the oldest ones are deleted
_METADATA = 4096  # bytes
_TTL_S = 10 * 366 * 86400
_URL_S = 3600.0
SIGNED = "/tinker-files/"
_ADAM = ("learning_rate", "beta1", "beta2", "eps", "weight_decay", "grad_clip_norm")
_CLIENT = {
    "parallel_fwdbwd_chunks": False,  # so a later request arrives only after an earlier one was answered or refused
    "use_pyqwest_transport": False,
    "sample_max_concurrent_requests": 64,
    "fwdbwd_max_chunk_len": 256,
    "sample_cancel_enabled": True,
}
_NOT_OFFERED = {
    "auth": "keys are used as they are",
    "audit": "no log of accesses is kept",
    "billing": "nothing is billed here",
    "copy_weights": "keys do not share checkpoints",
    "publish": "keys do not share checkpoints",
    "project": "there are no projects",
    "trace_export": "no traces are kept",
    "sessions": "sessions are not listed; list the checkpoints",
    "training_runs": "ask for one run, or list the checkpoints",
    "create_custom_loss": "use forward_backward_custom with a Python function",
    "join_sampling_session": "clients number their copies themselves",
    "retrieve_futures": "retrieve each future by itself",
    "samplers": "there is no such sampling session; the endpoint may have been started again",
}
"""What the service of Tinker's maker has and this endpoint has not, by a part of the path."""


@dataclass(kw_only=True)
class _Session:
    id: str
    client: str
    heard: float = field(default_factory=time.monotonic)
    samplers: dict[str, Place | None] = field(default_factory=dict)


class Tinker:
    """The state of Tinker's API: sessions, training clients, checkpoints and futures. `own`: the key is made anew at
    every start, and its checkpoints have one owner nevertheless."""

    def __init__(self, service: Service, training: Training, checkpoints: Checkpoints, *, own: bool) -> None:
        self.service, self.training, self.checkpoints, self._own = service, training, checkpoints, own
        self.futures = Futures()
        self.sessions: dict[str, _Session] = {}
        self.files: dict[str, tuple[Place, float]] = {}
        training.sweep = self._sweep
        source = Path(service.model.config.name_or_path)
        self.tokenizer = (hub_name(source) or (str(source),))[0]
        """Where the client loads the tokenizer from: the hub, or a folder of this machine."""
        self.sizes = Sizes(
            vocabulary=service.model.get_input_embeddings().num_embeddings,
            tokens=min(service.context, training.longest),
        )

    def owner(self, http: Request) -> str:
        return "own" if self._own else client_of(http)

    def session(self, http: Request, id: str | None) -> _Session:
        found = self.sessions.get(id or "")
        if found is None or found.client != client_of(http):
            raise ApiError(410, "there is no such session; the endpoint may have been started again", code="not_found")
        found.heard = time.monotonic()
        return found

    def sampler(self, http: Request, id: str) -> Place | None:
        session = self.sessions.get(id.partition(":")[0])
        if session is None or session.client != client_of(http) or id not in session.samplers:
            raise ApiError(404, f"there is no sampling session {id[:80]!a}; create one again", code="not_found")
        return session.samplers[id]

    def add_sampler(self, session: _Session, number: int, place: Place | None) -> str:
        id = f"{session.id}:sample:{number}"
        if len(session.samplers) >= _SAMPLERS and id not in session.samplers:
            del session.samplers[next(iter(session.samplers))]
        session.samplers[id] = place
        return id

    def end(self, session: _Session) -> None:
        """End a session and its training clients."""
        self.sessions.pop(session.id, None)
        for run in self.training.runs(session.client):
            if run.id.startswith(session.id):
                self.training.end(run)

    def delete(self, place: Place) -> None:
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
                self.end(session)
        for place, record in list(self.checkpoints.all()):
            try:
                if record.expired:
                    self.delete(place)
            except ApiError:  # samples use it
                continue
        self.files = {token: one for token, one in self.files.items() if one[1] > now}


def client_of(http: Request) -> str:
    return endpoint_of(http).client(http)


def tinker_router(tinker: Tinker) -> APIRouter:
    """Return the routes."""
    router = APIRouter(prefix="/api/v1", include_in_schema=False)
    training, checkpoints, futures, service = tinker.training, tinker.checkpoints, tinker.futures, tinker.service

    def submitted(run: Run, seq: int | None, make: Callable[[Future], Job]) -> dict[str, Any]:
        """Queue a request of a training client, which the client may send twice."""
        number = run.last + 1 if seq is None else seq
        if futures.find(run.client, id := f"{run.id}:{number}") is None:
            job = make(Future(id))
            with futures.kept(run.client, job.future):
                training.submit(number, job)
        return {"request_id": id, "model_id": run.id}

    def new_run(http: Request, body: Any, lora: Lora) -> Run:
        session = tinker.session(http, body.session_id)
        id = f"{session.id}:train:{body.model_seq_id or 0}"
        known = (run for run in training.runs(session.client) if run.id == id)
        return next(known, Run(id, session.client, lora, _metadata(body.user_metadata)))

    def check(body: Any) -> None:
        """Refuse other models and optimizers."""
        base, optimizer = getattr(body, "base_model", None), getattr(body, "optimizer_config", None)
        if base is not None and base != service.name:
            raise ApiError(400, f"there is no model {base[:80]!a}; this endpoint serves {service.name}")
        if optimizer is not None and optimizer.type != "adamw":
            raise ApiError(400, f"the optimizer {optimizer.type[:40]!a} is not offered; use Adam")

    # Service and sessions

    @router.get("/get_server_capabilities")
    async def capabilities() -> dict[str, Any]:
        model = {"model_name": service.name, "max_context_length": tinker.sizes.tokens}
        return {"supported_models": [{**model, "trainable": True, "sampleable": True}]}

    @router.post("/client/{kind}")
    async def config(kind: str) -> dict[str, Any]:
        return _CLIENT

    @router.post("/telemetry")
    async def telemetry() -> dict[str, str]:
        return {"status": "accepted"}  # and dropped

    @router.post("/create_session")
    async def create_session(body: types.CreateSessionRequest, http: Request) -> dict[str, Any]:
        if body.project_id is not None:
            raise ApiError(400, "there are no projects here; leave out project_id", param="project_id")
        session = _Session(id=secrets.token_hex(16), client=client_of(http))
        own = [one for one in tinker.sessions.values() if one.client == session.client]
        if len(own) >= _SESSIONS:
            tinker.end(min(own, key=lambda one: one.heard))
        tinker.sessions[session.id] = session
        return {"session_id": session.id}

    @router.post("/session_heartbeat")
    async def heartbeat(body: types.SessionHeartbeatRequest, http: Request) -> dict[str, str]:
        tinker.session(http, body.session_id)
        return {}

    @router.post("/sessions/{session_id}/finish")
    async def finish(session_id: str, http: Request) -> Response:
        tinker.end(tinker.session(http, session_id))
        return Response(status_code=204)

    # Training

    @router.post("/create_model")
    async def create_model(body: types.CreateModelRequest, http: Request) -> dict[str, Any]:
        check(body)
        if body.lora_config is None:
            raise ApiError(400, "only LoRA adapters are trained here; send lora_config", param="lora_config")
        run = new_run(http, body, Lora(**body.lora_config.model_dump()))

        def work() -> dict[str, Any]:
            training.create(run)
            return {"model_id": run.id}

        return submitted(run, 0, lambda future: Job(run, future, work))

    @router.post("/load_weights")
    async def load_weights(body: types.LoadWeightsRequest, http: Request) -> dict[str, Any]:
        check(body)
        if body.weights_access_token is not None:
            raise ApiError(400, "keys do not share checkpoints; leave out weights_access_token")
        place = checkpoints.parse(tinker.owner(http), body.path)
        if body.model_id is not None:
            run, seq = training.run(client_of(http), body.model_id), body.seq_id
        else:
            run, seq = new_run(http, body, checkpoints.record(place).lora), 0

        def work() -> dict[str, Any]:
            training.load(run, place, optimizer=body.optimizer)
            return {"path": place.uri, "model_id": run.id}

        return submitted(run, seq, lambda future: Job(run, future, work))

    @router.post("/get_info")
    async def get_info(body: types.GetInfoRequest, http: Request) -> dict[str, Any]:
        run = training.run(client_of(http), body.model_id)
        data = {"arch": type(service.model).__name__, "model_name": service.name, "tokenizer_id": tinker.tokenizer}
        return {"model_data": data, "model_id": run.id, **_about(run.lora), "model_name": service.name}

    @router.post("/forward_backward")
    async def forward_backward(http: Request) -> dict[str, Any]:
        if "content-encoding" in http.headers:
            raise ApiError(400, "send the body without compression")
        message = read_request(await http.body())
        run = training.run(client_of(http), message.model_id)
        return submitted(run, message.seq_id, lambda future: Job(run, future, steps=steps_of(message, tinker.sizes)))

    @router.post("/optim_step")
    async def optim_step(body: types.OptimStepRequest, http: Request) -> dict[str, Any]:
        run, params = training.run(client_of(http), body.model_id), body.optim_params
        if not isinstance(params, types.AdamParams):
            raise ApiError(400, f"the optimizer {params.type[:40]!a} is not offered; use AdamParams")
        adam = {name: getattr(params, name) for name in _ADAM}
        return submitted(run, body.seq_id, lambda future: Job(run, future, lambda: training.step(run, adam)))

    def save(
        http: Request, body: Any, kind: str, answer: Callable[[Place], dict[str, Any]], *, overwrite: bool = False
    ) -> dict[str, Any]:
        run = training.run(client_of(http), body.model_id)
        if getattr(body, "kind", "snapshot") != "snapshot":
            raise ApiError(400, "kind: only snapshots are sampled from here", param="kind")
        if getattr(body, "age_encryption_recipients", None):
            raise ApiError(400, "checkpoints leave this machine only by you; leave out age_encryption_recipients")
        snapshot = body.path is None
        name = f"snapshot-{body.seq_id}" if snapshot else body.path
        place = checkpoints.place(tinker.owner(http), run.id, kind, name)
        metadata = _metadata(getattr(body, "user_metadata", None))
        about = {"snapshot": snapshot, "expires": _end(body.ttl_seconds), "metadata": metadata}

        def work() -> dict[str, Any]:
            training.save(run, place, optimizer=kind == WEIGHTS, overwrite=overwrite, **about)
            if snapshot:
                run.snapshots.append(place)
                for old in run.snapshots[:-_SNAPSHOTS]:
                    tinker.delete(old)
                    run.snapshots.remove(old)
            return answer(place)

        return submitted(run, body.seq_id, lambda future: Job(run, future, work))

    @router.post("/save_weights")
    async def save_weights(body: types.SaveWeightsRequest, http: Request) -> dict[str, Any]:
        if body.path is None:
            body.path = f"step-{body.seq_id}"
        return save(http, body, WEIGHTS, lambda place: {"path": place.uri}, overwrite=body.overwrite)

    @router.post("/save_weights_for_sampler")
    async def save_for_sampler(body: types.SaveWeightsForSamplerRequest, http: Request) -> dict[str, Any]:
        session = tinker.session(http, body.model_id.partition(":")[0])

        def answer(place: Place) -> dict[str, Any]:
            if body.path is not None:
                return {"path": place.uri}
            return {"sampling_session_id": tinker.add_sampler(session, body.sampling_session_seq_id or 0, place)}

        return save(http, body, SAMPLER, answer)

    @router.post("/save_weights_external")
    async def save_external(body: types.SaveWeightsExternalRequest, http: Request) -> dict[str, Any]:
        return save(http, body, EXTERNAL, lambda place: {"path": place.uri, "size_bytes": checkpoints.size(place)})

    # Sampling

    @router.post("/create_sampling_session")
    async def create_sampling_session(body: types.CreateSamplingSessionRequest, http: Request) -> dict[str, Any]:
        session, place = tinker.session(http, body.session_id), None
        check(body)
        if body.model_path is not None:
            place = checkpoints.parse(tinker.owner(http), body.model_path)
            if (record := checkpoints.record(place)).base_model != service.name:
                raise ApiError(400, f"{place.uri} is of the model {record.base_model}, and this one is {service.name}")
        return {"sampling_session_id": tinker.add_sampler(session, body.sampling_session_seq_id, place)}

    @router.get("/samplers/{sampler_id}")
    async def sampler(sampler_id: str, http: Request) -> dict[str, Any]:
        place = tinker.sampler(http, sampler_id)
        path = None if place is None else place.uri
        return {"sampler_id": sampler_id, "base_model": service.name, "model_path": path}

    @router.post("/asample")
    async def asample(body: types.SampleRequest, http: Request) -> dict[str, Any]:
        client = client_of(http)
        if body.sampling_session_id is None or body.seq_id is None:
            raise ApiError(400, "send sampling_session_id and seq_id", param="sampling_session_id")
        place = tinker.sampler(http, body.sampling_session_id)
        id = f"{body.sampling_session_id}:{body.seq_id}"
        if futures.find(client, id) is None:
            task = None if place is None else sampling.task_of(place, training.tasks, checkpoints)
            requests = sampling.requests_of(body, service, client=client, task=task, id=id)
            future = Future(id)
            with futures.kept(client, future):
                sampling.start(body, requests, service, future)
        return {"request_id": id, "sample_sequence_ids": [f"{id}:{n}" for n in range(body.num_samples)]}

    # Futures

    @router.post("/retrieve_future")
    async def retrieve_future(body: types.FutureRetrieveRequest, http: Request) -> Response:
        return await futures.get(client_of(http), body.request_id).wait()

    @router.post("/cancel_future")
    async def cancel_future(body: types.FutureRetrieveRequest, http: Request) -> Response:
        if (found := futures.find(client_of(http), body.request_id)) is not None:
            found.cancel()
        return Response(status_code=204)

    # Checkpoints

    def described(place: Place, record: Record) -> dict[str, Any]:
        return {
            "checkpoint_id": f"{place.kind}/{place.name}",
            "checkpoint_type": TYPES[place.kind],
            "time": _date(record.time),
            "tinker_path": place.uri,
            "size_bytes": checkpoints.size(place),
            "user_metadata": record.metadata,
            "expires_at": _date(record.expires),
        }

    @router.get("/training_runs/{run}")
    async def training_run(run: str, http: Request) -> dict[str, Any]:
        live = next((one for one in training.runs(client_of(http)) if one.id == run), None)
        found = [one for one in checkpoints.listed(tinker.owner(http)) if one[0].run == run]
        if live is None and not found:
            raise ApiError(404, "there is no such training run", code="not_found")
        last = {kind: [described(*one) for one in found if one[0].kind == kind][:1] for kind in TYPES}
        return {
            "training_run_id": run,
            "model_owner": "own",
            **_about(found[0][1].lora if live is None else live.lora),
            "base_model": service.name if live is not None else found[0][1].base_model,
            "last_request_time": _date(found[0][1].time if live is None else live.used),
            "last_checkpoint": next(iter(last[WEIGHTS]), None),
            "last_sampler_checkpoint": next(iter(last[SAMPLER]), None),
            "user_metadata": None if live is None else live.metadata,
        }

    @router.get("/checkpoints")
    async def user_checkpoints(http: Request, limit: int = 100, offset: int = 0) -> dict[str, Any]:
        found, limit, offset = checkpoints.listed(tinker.owner(http)), max(0, min(limit, 1000)), max(0, offset)
        cursor = {"offset": offset, "limit": limit, "total_count": len(found)}
        return {"checkpoints": [described(*one) for one in found[offset : offset + limit]], "cursor": cursor}

    @router.get("/training_runs/{run}/checkpoints")
    async def run_checkpoints(run: str, http: Request) -> dict[str, Any]:
        return {"checkpoints": [described(*one) for one in checkpoints.listed(tinker.owner(http)) if one[0].run == run]}

    @router.delete("/training_runs/{run}/checkpoints/{kind}/{name}")
    async def delete(run: str, kind: str, name: str, http: Request) -> Response:
        tinker.delete(checkpoints.place(tinker.owner(http), run, kind, name))
        return Response(status_code=204)

    @router.put("/training_runs/{run}/checkpoints/{kind}/{name}/ttl")
    async def ttl(run: str, kind: str, name: str, http: Request, ttl_seconds: Embedded[int | None] = None) -> Response:
        checkpoints.set_time(checkpoints.place(tinker.owner(http), run, kind, name), _end(ttl_seconds))
        return Response(status_code=204)

    @router.get("/training_runs/{run}/checkpoints/{kind}/{name}/external_weights_urls")
    async def external_urls(run: str, kind: str, name: str, http: Request) -> dict[str, Any]:
        place = checkpoints.place(tinker.owner(http), run, kind, name)
        checkpoints.record(place)
        token = secrets.token_urlsafe(32)
        tinker.files[token] = place, time.monotonic() + _URL_S
        base = str(http.base_url).rstrip("/") + SIGNED + token
        return {"urls": {file: f"{base}/{file}" for file in FILES}, "expires": _date(time.time() + _URL_S)}

    @router.post("/weights_info")
    async def weights_info(tinker_path: Embedded[str], http: Request) -> dict[str, Any]:
        record = checkpoints.record(checkpoints.parse(tinker.owner(http), tinker_path))
        return {"base_model": record.base_model, **_about(record.lora)}

    @router.api_route("/{rest:path}", methods=["GET", "POST", "PUT", "DELETE"])
    async def others(rest: str) -> Response:
        found = [text for part, text in _NOT_OFFERED.items() if part in rest.split("/")]
        reason = next(iter(found), "there is no such route")
        raise ApiError(404, f"{rest[:200]!a} is not offered here: {reason}", code="not_offered")

    return router


def files_router(tinker: Tinker) -> APIRouter:
    """Return the route of files, whose address is a secret that only the owner of the files was told."""
    router = APIRouter(include_in_schema=False)

    @router.get(SIGNED + "{token}/{file}")
    async def download(token: str, file: str) -> FileResponse:
        place, until = tinker.files.get(token, (None, 0.0))
        if place is None or until < time.monotonic() or file not in FILES:
            raise ApiError(404, "this address is not valid, or no longer; ask for the urls again")
        return FileResponse(tinker.checkpoints.folder(place) / file)

    return router


def _about(lora: Lora) -> dict[str, Any]:
    trained = {name: getattr(lora, name) for name in ("train_unembed", "train_mlp", "train_attn")}
    return {"is_lora": True, "lora_rank": lora.rank, **trained}


def _date(seconds: float | None) -> str | None:
    return None if seconds is None else datetime.fromtimestamp(seconds, UTC).isoformat()


def _end(seconds: int | None) -> float | None:
    if seconds is not None and not 0 < seconds <= _TTL_S:
        raise ApiError(400, "ttl_seconds is from 1 to ten years", param="ttl_seconds")
    return None if seconds is None else time.time() + seconds


def _metadata(given: Any) -> dict[str, str] | None:
    found = None if given is None else {str(key): str(value) for key, value in given.items()}
    if found is not None and len(msgspec.json.encode(found)) > _METADATA:
        raise ApiError(400, f"user_metadata exceeds {_METADATA:,} bytes", param="user_metadata")
    return found
