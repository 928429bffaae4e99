"""What all routes of an endpoint share: its settings, and its service, which prepares requests for the engine."""

import asyncio
import math
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import anyio.to_thread
from fastapi import APIRouter
from starlette.requests import Request
from transformers import GenerationConfig, PreTrainedTokenizerBase

from symbiosis_priv.checkpoints.checkpoint import hub_name
from symbiosis_priv.errors import ConfigError
from tenant.endpoint.api.bodies import CompletionFields
from tenant.endpoint.api.errors import ApiError
from tenant.endpoint.api.http_server import CONNECTIONS
from tenant.endpoint.api.vocabulary import Vocabulary
from tenant.endpoint.engine.answer import TextStream
from tenant.endpoint.engine.queued import Engine
from tenant.endpoint.engine.requests import EngineRequest, Pooling, Sampling
from tenant.model.loading import is_classifier
from tenant.session.session import Session
from tenant.tasks import Tasks

T = TypeVar("T")
_LOOK_S = 5.0
OWNED = "tinker."
"""Begins the names of tasks that belong to one key, which are no models of the API."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Access rules and limits of an endpoint.

    Args:
        keys: API keys. Each key is one client, and clients get equal shares. The first one may read all counters.
        hosts: names allowed in the `Host` header, besides IP addresses. Against DNS rebinding, in which a web page's
            own name resolves to this machine.
        body_limit, body_s: bytes of a request's body, and seconds in which it must arrive.
        requests: limit of requests in progress. A client may have at most as many of them as stay free.
        drain_s: seconds that answers may take to end when the server stops.
        signed: prefixes of paths that hold a secret of their own in place of a key.
    """

    keys: tuple[str, ...]
    hosts: frozenset[str] = frozenset({"localhost"})
    body_limit: int = 8 << 20
    body_s: float = 30.0
    requests: int = CONNECTIONS
    drain_s: float = 30.0
    open_paths: frozenset[str] = frozenset({"/", "/health", "/ready"})
    signed: tuple[str, ...] = ()


class Service:
    """An engine with its models. Raises `ConfigError`: an adapter has the base model's name.

    Args:
        model: the base model of the engine; its configuration has the context length and the default sampling.
        pooling: how the hidden states of a text are combined to an embedding.
        answer_bucket: the smallest bucket of every request (`EngineRequest.bucket`).
    """

    def __init__(
        self,
        engine: Engine,
        model: Any,
        tokenizer: PreTrainedTokenizerBase,
        *,
        name: str,
        tasks: Tasks | None = None,
        pooling: Pooling = "mean",
        answer_bucket: int = 1,
        session: Session | None = None,
    ) -> None:
        config = model.config.get_text_config()
        generation = model.generation_config if model.can_generate() else GenerationConfig()
        ends = generation.eos_token_id
        found = {*(ends if isinstance(ends, list) else [ends]), tokenizer.eos_token_id}
        self.engine = engine
        self.model = model
        self.tokenizer = tokenizer
        self.name = name
        self.root = "@".join(hub_name(Path(model.config.name_or_path)) or (name,))
        """The base model's name on the hub with its commit, or else its name for clients."""
        self.tasks = tasks
        self.pooling = pooling
        self.answer_bucket = answer_bucket
        self.created = int(time.time())
        self.context = engine.context
        self.ends = frozenset(token for token in found if token is not None)
        self.vocabulary = Vocabulary(tokenizer, size=config.vocab_size, ends=self.ends)
        chosen = {name: getattr(generation, name, None) for name in ("temperature", "top_p", "top_k")}
        self._defaults = {"temperature": 1.0} | {name: one for name, one in chosen.items() if one is not None}
        self.labels: dict[int, str] | None = model.config.id2label if is_classifier(type(model)) else None
        """The names of a classifier's labels; None for a model that generates."""
        self._longest_token = max(map(len, tokenizer.get_vocab()))  # characters
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="endpoint-texts")
        self._turns = defaultdict[str, asyncio.Lock](asyncio.Lock)  # by client
        self.routers: list[APIRouter] = []
        """Routes besides those of OpenAI's API."""
        self._session = session
        self._looking, self._reaches, self._looked_at = asyncio.Lock(), True, -math.inf
        if tasks is not None and name in tasks:
            raise ConfigError(f"an adapter has the name of the base model, {name}; choose another name")

    def models(self) -> list[dict[str, Any]]:
        """Return the base model, and all adapters with the base model as `parent`."""
        base = {
            "id": self.name,
            "object": "model",
            "created": self.created,
            "owned_by": "symbiosis-priv",
            "root": self.root,
            "parent": None,
            "max_model_len": self.context,
        }
        infos = [] if self.tasks is None else [one for one in self.tasks.infos() if not one.name.startswith(OWNED)]
        return [base, *(base | {"id": one.name, "parent": self.name} for one in infos)]

    def adapter(self, model: str) -> str | None:
        """Return the adapter with a model's name; None for the base model. Raises `ApiError` for another name."""
        if model == self.name:
            return None
        if self.tasks is not None and model in self.tasks and not model.startswith(OWNED):
            return model
        raise ApiError(
            404,
            f"there is no model {model[:80]!a}; GET /v1/models lists the models",
            code="model_not_found",
            param="model",
        )

    async def is_ready(self) -> bool:
        """Return whether an executor can be reached. Connects to executors at most once in `_LOOK_S` seconds."""
        if self._session is None:
            return True
        async with self._looking:
            if time.monotonic() - self._looked_at > _LOOK_S:
                self._reaches = await anyio.to_thread.run_sync(self._session.runtime.prober.reaches_executor)
                self._looked_at = time.monotonic()
            return self._reaches

    def chat_template(self) -> str:
        """Return the base model's chat template, which its adapters use too. Raises `ApiError` if there is none."""
        template: Any = self.tokenizer.chat_template
        if isinstance(template, dict):
            template = template.get("default")
        if not isinstance(template, str):
            raise ApiError(
                400, "this model has no chat template; use /v1/completions, or a model for chats", param="messages"
            )
        return template

    async def encode(self, text: str, *, param: str, client: str, special: bool = True) -> list[int]:
        """Return the token ids of a text, with the tokenizer's special tokens if `special` is True."""
        self.check_length(text, param=param)
        return await self.in_thread(client, lambda: [*self.tokenizer(text, add_special_tokens=special)["input_ids"]])

    def decode(self, tokens: Sequence[int]) -> tuple[str, list[int]]:
        """Return the text of tokens without special tokens, and the place of each token in the text."""
        stream, text, places = TextStream(self.tokenizer), list[str](), list[int]()
        for token in tokens:
            places.append(stream.place)
            text.append(stream.add(token))
        return "".join([*text, stream.end()]), places

    def check_length(self, text: str, *, param: str) -> None:
        """Raise `ApiError` for a text that has too many tokens whatever they are."""
        if len(text) > self.context * self._longest_token:
            raise self.too_long(len(text), "characters", param=param)

    async def in_thread(self, client: str, work: Callable[[], T]) -> T:
        """Run `work` in the only thread for texts, where clients take turns. Work that has begun keeps the
        thread until its end, also if its client has left; work that waits then is dropped."""
        async with self._turns[client]:  # at most one call of each client is in the queue
            return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    async def prompts(self, given: str | Sequence[Any], *, param: str, client: str) -> list[list[int]]:
        """Return the token ids of each text. `given` is one text or several, as strings or token ids. Raises
        `ApiError`."""
        if isinstance(given, str) or isinstance(given[0], int):
            return [await self._prompt(given, param=param, client=client)]
        return [await self._prompt(one, param=f"{param}.{place}", client=client) for place, one in enumerate(given)]

    async def _prompt(self, given: str | Sequence[Any], *, param: str, client: str) -> list[int]:
        tokens = await self.encode(given, param=param, client=client) if isinstance(given, str) else [*given]
        if not tokens:
            raise ApiError(400, "a text has no tokens; there is nothing to continue", param=param)
        if len(tokens) > self.context:
            raise self.too_long(len(tokens), "tokens", param=param)
        if max(tokens) >= self.vocabulary.size:
            raise ApiError(
                400, f"{max(tokens)} is not a token of this model, which has {self.vocabulary.size:,}", param=param
            )
        return tokens

    def request(
        self,
        body: CompletionFields,
        prompt: Sequence[int],
        *,
        client: str,
        limit: int | None,
        default: int,
        **sampling: Any,
    ) -> EngineRequest:
        """Return the request to the engine for one prompt, with at most `limit` new tokens (`default` if None). Missing
        options of sampling are the model's generation config's, else OpenAI's defaults. Raises `ApiError`: a field is
        wrong, or the tokens exceed the context."""
        if body.stream_options is not None and not body.stream:
            raise ApiError(400, "stream_options needs stream: true", param="stream_options")
        if sampling.get("grammar") is not None and (body.ignore_eos or body.min_tokens):
            field = "ignore_eos" if body.ignore_eos else "min_tokens"
            raise ApiError(400, f"{field} and an answer in a schema exclude each other", param=field)
        left = self.context - len(prompt)
        if limit is not None and limit > left:
            raise ApiError(
                400,
                f"{len(prompt):,} tokens of prompt and {limit:,} new tokens exceed this model's context of "
                f"{self.context:,}",
                code="context_length_exceeded",
                param="max_completion_tokens" if body.max_tokens is None else "max_tokens",
            )
        if (body.min_tokens or 0) > (left if limit is None else limit):
            raise ApiError(400, "min_tokens is more than the answer may have", param="min_tokens")
        biases = {int(token): bias for token, bias in (body.logit_bias or {}).items()}
        if biases and max(biases) >= self.vocabulary.size:
            raise ApiError(400, f"{max(biases)} is not a token of this model", param="logit_bias")
        given: dict[str, Any] = body.model_dump(include=set(vars(Sampling())), exclude_none=True)
        return EngineRequest(
            id=f"request-{uuid.uuid4().hex}",
            prompt=tuple(prompt),
            adapter=self.adapter(body.model),
            client=client,
            max_tokens=min(max(default, body.min_tokens or 0), left) if limit is None else limit,
            stop_tokens=frozenset() if body.ignore_eos else self.ends,
            stop=tuple([body.stop] if isinstance(body.stop, str) else body.stop or ()),
            sampling=Sampling(**self._defaults | given | {"logit_bias": biases} | sampling),
            bucket=max(self.answer_bucket, body.answer_bucket or 1),
            shows_row=body.stream_options is not None and body.stream_options.include_row,
        )

    def too_long(self, count: int, unit: str, *, param: str) -> ApiError:
        """Return the error for a prompt that exceeds the context."""
        return ApiError(
            400,
            f"the prompt has {count:,} {unit}, and this model's context is {self.context:,} tokens; shorten it",
            code="context_length_exceeded",
            param=param,
        )


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """What the routes of one endpoint use. Stored as `app.state.endpoint`."""

    service: Service
    settings: Settings

    def client(self, http: Request) -> str:
        """Return the name of the client for the engine: a digest of its key."""
        return str(http.scope["state"]["client"])


def sees_all(http: Request) -> bool:
    """Return whether the key of a request may read counters of all keys' requests."""
    return bool(http.scope["state"]["sees_all"])


def endpoint_of(http: Request) -> Endpoint:
    endpoint: Endpoint = http.app.state.endpoint
    return endpoint
