"""Tinker's HTTP routes. Requests of a training client and samples are answered at once with the id of a future.

What is refused gets status 400, 404 or 413, which the client shows at once; it would repeat 408, 409, 429 and 5xx for
minutes. So 429 means that waiting helps. Errors of futures carry their status in their text.
"""

import asyncio
import secrets
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Annotated, Any, TypeVar

from cryptography.fernet import Fernet, InvalidToken
from fastapi import APIRouter, Body, Depends, Query
from pydantic import AfterValidator, BaseModel
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Route
from tinker import types

from symbiosis_priv.checkpoints.checkpoint import hub_name
from tenant.endpoint.api.errors import ApiError
from tenant.endpoint.api.running import Running
from tenant.endpoint.api.service import Service, endpoint_of
from tenant.endpoint.engine.queued import Turn
from tenant.endpoint.options import Serving
from tenant.endpoint.tinker import sampling
from tenant.endpoint.tinker.checkpoints import EXTERNAL, FILES, SAMPLER, SNAPSHOTS, WEIGHTS, Checkpoints, Place
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
    *("age_encryption_recipients", "kind", "optimizer_config", "overwrite", "project_id", "prompt_alt_tokens_k"),
    *("prompt_logprobs_last_n", "record_stability_info", "target_prompt_logprobs", "weights_access_token"),
}
"""Fields of bodies that the service of Tinker's maker has. Routes that are not here get status 404."""


def _offered(body: T) -> T:
    for name in _NOT_OFFERED & type(body).model_fields.keys():
        if getattr(body, name) not in (None, False, type(body).model_fields[name].default):
            raise ApiError(400, f"{name} is not offered here; leave it out", code="not_offered", param=name)
    return body


def _client(http: Request) -> str:
    return endpoint_of(http).client(http)


Offered = Annotated[T, AfterValidator(_offered)]
Client = Annotated[str, Depends(_client)]


class Tinker:
    """Sessions, samplers and futures, and the routes to them, to training clients and to checkpoints; those that read
    many files run in threads."""

    def __init__(self, service: Service, training: Training, checkpoints: Checkpoints) -> None:
        self.service, self.training, self.checkpoints = service, training, checkpoints
        self.futures = Futures()
        self.longest = min(service.context, training.longest)
        self._heard: dict[tuple[str, str], float] = {}  # sessions by client and id, and when they were heard last
        self._samplers: dict[tuple[str, str], Place | None] = {}  # by client and id; None samples from the base model
        self._seal = Fernet(Fernet.generate_key())

    def router(self) -> APIRouter:
        model = {"model_name": self.service.name, "max_context_length": self.longest}
        capabilities = {"supported_models": [{**model, "trainable": True, "sampleable": True}]}
        router, checkpoints = APIRouter(include_in_schema=False), "training_runs/{run}/checkpoints"
        for path, answer in (
            ("get_server_capabilities", capabilities),
            ("client/config", _CLIENT),
            ("client/dynamic_config", _CLIENT),
            ("telemetry", {"status": "accepted"}),  # and dropped
        ):
            router.routes.append(Route(f"/api/v1/{path}", JSONResponse(answer)))
        for post in (
            *(self.create_session, self.session_heartbeat, self.create_model, self.load_weights, self.get_info),
            *(self.forward_backward, self.optim_step, self.save_weights, self.save_weights_external),
            *(self.save_weights_for_sampler, self.create_sampling_session, self.asample, self.weights_info),
            *(self.retrieve_future, self.cancel_future),
        ):
            router.add_api_route(f"/api/v1/{post.__name__}", post, methods=["POST"], response_model=None)
        for method, path, route in (
            ("POST", "sessions/{session}/finish", self.finish),
            ("GET", "samplers/{sampler}", self.sampler),
            ("GET", "checkpoints", self.listed),
            ("GET", checkpoints, self.listed),
            ("DELETE", checkpoints + "/{kind}/{name}", self.delete),
            ("GET", checkpoints + f"/{EXTERNAL}/{{name}}/external_weights_urls", self.external_urls),
        ):
            router.add_api_route(f"/api/v1/{path}", route, methods=[method], response_model=None)
        router.add_api_route(SIGNED + "{sealed}", self.download)
        return router

    # Service and sessions

    async def create_session(self, body: Offered[types.CreateSessionRequest], client: Client) -> Answer:
        session = secrets.token_hex(16)
        self._heard[client, session] = time.monotonic()
        return {"session_id": session}

    async def session_heartbeat(self, body: types.SessionHeartbeatRequest, client: Client) -> Answer:
        self._session(client, body.session_id)
        return {}

    async def finish(self, session: str, client: Client) -> Response:
        if (client, session) in self._heard:  # it may have ended because the client was silent
            self._end(client, session)
        return Response(status_code=204)

    # Training

    async def create_model(self, body: Offered[types.CreateModelRequest], client: Client) -> Answer:
        self._check(body.base_model)
        if body.lora_config is None:
            raise ApiError(400, "only LoRA adapters are trained here; send lora_config", param="lora_config")
        run = self._new_run(client, body.session_id, body.model_seq_id, body.lora_config)
        return self._submit(0, Job(run, partial(self.training.create, run)))

    async def load_weights(self, body: Offered[types.LoadWeightsRequest], client: Client) -> Answer:
        self._check(body.base_model)
        place = self.checkpoints.place(client, body.path)
        record = self.checkpoints.record(place)
        self._check(record.base_model)
        if body.model_id is not None:
            run, seq = self.training.run(client, body.model_id), body.seq_id
        else:
            run, seq = self._new_run(client, body.session_id, body.model_seq_id, record.lora), 0
        return self._submit(seq, Job(run, partial(self.training.load, run, place, optimizer=body.optimizer)))

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
        return self._submit(body.seq_id, Job(run, partial(self.training.step, run, adam)))

    async def save_weights(self, body: Offered[types.SaveWeightsRequest], client: Client) -> Answer:
        return self._save(client, body, WEIGHTS, f"step-{body.seq_id}" if body.path is None else body.path)

    async def save_weights_external(self, body: Offered[types.SaveWeightsExternalRequest], client: Client) -> Answer:
        return self._save(client, body, EXTERNAL, body.path)

    async def save_weights_for_sampler(
        self, body: Offered[types.SaveWeightsForSamplerRequest], client: Client
    ) -> Answer:
        if body.path is not None:
            return self._save(client, body, SAMPLER, body.path)
        run = self.training.run(client, body.model_id)
        seq = run.last + 1 if body.seq_id is None else body.seq_id
        place = Place(self.checkpoints.owner(client), run.id, SNAPSHOTS, str(seq))
        session = self._session(client, run.id.partition(":")[0])
        sampler = self._add_sampler(client, session, body.sampling_session_seq_id or 0, place)
        return self._submit(seq, Job(run, partial(self.training.save, run, place, sampler)))

    # Sampling

    async def create_sampling_session(self, body: types.CreateSamplingSessionRequest, client: Client) -> Answer:
        session, place = self._session(client, body.session_id), None
        self._check(body.base_model)
        if body.model_path is not None:
            place = self.checkpoints.place(client, body.model_path)
            self._check(self.checkpoints.record(place).base_model)
        return self._add_sampler(client, session, body.sampling_session_seq_id, place)

    async def sampler(self, sampler: str, client: Client) -> Answer:
        place = self._sampler(client, sampler)
        return {"sampler_id": sampler, "base_model": self.service.name, "model_path": place and place.uri}

    async def asample(self, body: Offered[types.SampleRequest], http: Request, client: Client) -> Answer:
        place = self._sampler(client, body.sampling_session_id or "")
        if self.futures.find(client, id := f"{body.sampling_session_id}:{body.seq_id}") is None:
            task = None if place is None else self.checkpoints.task(place)
            requests = await sampling.requests_of(body, self.service, client=client, task=task)
            prompt, new = len(requests[0].prompt), sum(one.max_tokens for one in requests)
            size = 8 * (prompt * (2 + body.topk_prompt_logprobs) + new * (1 + body.topk_sample_logprobs))
            self.futures.make_room(client, size)
            running = Running(endpoint_of(http), requests)
            future = self.futures.start(client, id, sampling.gathered(body, running), size)
            future.task.add_done_callback(lambda _: running.cancel())
        return {"request_id": id, "sample_sequence_ids": [f"{id}:{n}" for n in range(body.num_samples)]}

    # Futures

    async def retrieve_future(self, body: types.FutureRetrieveRequest, client: Client) -> Response:
        if (found := self.futures.find(client, body.request_id)) is None:  # the client sends the request again
            raise ApiError(410, "there is no such request, or no longer; the endpoint may have been started again")
        return await found.answer()

    async def cancel_future(self, body: types.FutureRetrieveRequest, client: Client) -> Response:
        # a request of a training client is computed in any case, and keeps its result
        if ":sample:" in body.request_id and (found := self.futures.find(client, body.request_id)) is not None:
            found.task.cancel()
        return Response(status_code=204)

    # Checkpoints

    def listed(
        self,
        client: Client,
        run: str | None = None,
        limit: Annotated[int | None, Query(ge=0)] = None,
        offset: Annotated[int, Query(ge=0)] = 0,
    ) -> Answer:
        found = self.checkpoints.listed(client, run)
        cursor = {"offset": offset, "limit": limit or len(found), "total_count": len(found)}
        return {"checkpoints": found[offset:][:limit], "cursor": cursor}

    def weights_info(self, tinker_path: Annotated[str, Body(embed=True)], client: Client) -> Answer:
        record = self.checkpoints.record(self.checkpoints.place(client, tinker_path))
        return {"base_model": record.base_model, **_about(record.lora)}

    def delete(self, run: str, kind: str, name: str, client: Client) -> Response:
        self.checkpoints.delete(self.checkpoints.place(client, f"tinker://{run}/{kind}/{name}"))
        return Response(status_code=204)

    def external_urls(self, run: str, name: str, http: Request, client: Client) -> Answer:
        place = self.checkpoints.place(client, f"tinker://{run}/{EXTERNAL}/{name}")
        self.checkpoints.record(place)
        sealed = {file: self._seal.encrypt("/".join((*place, file)).encode()).decode() for file in FILES}
        base = f"{http.base_url}".rstrip("/") + SIGNED
        return {"urls": {file: base + one for file, one in sealed.items()}, "expires": int(time.time()) + _URL_S}

    def download(self, sealed: str) -> FileResponse:
        """The address was sealed for the owner of the file."""
        try:
            *place, file = self._seal.decrypt(sealed, ttl=_URL_S).decode().split("/")
        except InvalidToken:
            raise ApiError(404, "this address is not valid, or no longer; ask for the urls again") from None
        self.checkpoints.record(found := Place(*place))
        return FileResponse(self.checkpoints.folder(found) / file)

    # What several routes do

    def _session(self, client: str, id: str | None) -> str:
        """Return the id of a session, which was heard now, and end those that were silent. Raises `ApiError`."""
        if id is None or (client, id) not in self._heard:
            raise ApiError(410, "there is no such session; the endpoint may have been started again", code="not_found")
        self._heard[client, id] = now = time.monotonic()
        for other in [one for one, heard in self._heard.items() if now - heard > _SESSION_S]:
            self._end(*other)
        return id

    def _end(self, client: str, session: str) -> None:
        """End a session, its training clients and its samples. The results that are there stay."""
        del self._heard[client, session]
        for run in self.training.runs(client):
            if run.id.startswith(session):
                self.training.end(run)
        self._samplers = {one: place for one, place in self._samplers.items() if not one[1].startswith(session)}
        self.futures.cancel(client, f"{session}:sample:")

    def _sampler(self, client: str, id: str) -> Place | None:
        if (client, id) not in self._samplers:
            raise ApiError(404, f"there is no sampling session {id[:80]!a}; create one again", code="not_found")
        return self._samplers[client, id]

    def _add_sampler(self, client: str, session: str, number: int, place: Place | None) -> Answer:
        self._samplers[client, id := f"{session}:sample:{number}"] = place
        return {"sampling_session_id": id}

    def _check(self, base: str | None) -> None:
        if base not in (None, self.service.name):
            raise ApiError(400, f"there is no model {base[:80]!a}; this endpoint serves {self.service.name}")

    def _new_run(self, client: str, session: str | None, number: int | None, lora: types.LoraConfig) -> Run:
        id = f"{self._session(client, session)}:train:{number or 0}"
        return next((run for run in self.training.runs(client) if run.id == id), Run(id, client, lora))

    def _submit(self, seq: int | None, job: Job, *, size: int = 1024) -> Answer:
        """Queue a request of a training client, which the client may send twice."""
        run, number = job.run, job.run.last + 1 if seq is None else seq
        if self.futures.find(run.client, id := f"{run.id}:{number}") is None:
            self.futures.make_room(run.client, size)
            self.training.submit(number, job)
            self.futures.start(run.client, id, asyncio.shield(asyncio.wrap_future(job.done)), size)
        return {"request_id": id, "model_id": run.id}

    def _save(self, client: str, body: Any, kind: str, name: str) -> Answer:
        run, ttl = self.training.run(client, body.model_id), body.ttl_seconds
        if ttl is not None and not 0 < ttl <= _TTL_S:
            raise ApiError(400, "ttl_seconds is from 1 to ten years", param="ttl_seconds")
        expires = None if ttl is None else datetime.now(UTC) + timedelta(seconds=ttl)
        place = self.checkpoints.place(client, f"tinker://{run.id}/{kind}/{name}")
        save = partial(self.training.save, run, place, {"path": place.uri}, expires)
        return self._submit(body.seq_id, Job(run, save))


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
