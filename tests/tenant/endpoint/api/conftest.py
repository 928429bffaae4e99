"""An endpoint on loopback: the tiny Llama in `simulate`, an adapter, and the official client."""

import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

from tenant import RemoteConfig
from tenant.endpoint.api.application import create_app
from tenant.endpoint.api.http_server import Server
from tenant.endpoint.api.service import Service, Settings
from tenant.endpoint.engine.continuous import ContinuousEngine, EngineLimits
from tenant.endpoint.engine.packed_model import PackedModel
from tenant.model.loading import load_language_model, load_tokenizer
from tenant.tasks import Tasks
from tests.waiting import answering

KEY = "sk-test"
CHAT = (
    "{% if mood %}Be {{ mood }}. {% endif %}"
    "{% if tools %}<tools>{{ tools | tojson }}</tools> write <tool_call>...{% endif %}"
    "{% for m in messages %}{% if m.role not in ('system', 'user', 'assistant', 'tool') %}"
    "{{ raise_exception('no such role') }}{% endif %}[{{ m.role }}]{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.arguments.city }}{% endfor %}\n{% endfor %}[assistant]"
)


@dataclass(frozen=True)
class Served:
    """A running endpoint."""

    service: Service
    settings: Settings
    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


@pytest.fixture(scope="session")
def served(checkpoint: Path, adapters: Path) -> Iterator[Served]:
    model = load_language_model(checkpoint, remote=RemoteConfig(masking="simulate"))
    tokenizer: Any = load_tokenizer(checkpoint)
    tokenizer.chat_template = CHAT
    tasks = Tasks(model)
    tasks.register("lora", adapters / "lora")
    engine = ContinuousEngine(PackedModel(model, tasks), tokenizer, limits=EngineLimits(waiting=64))
    service = Service(engine, model, tokenizer, name="tiny", tasks=tasks)
    settings = Settings(keys=(KEY, "sk-other"), body_limit=1 << 20, body_s=0.3, drain_s=5.0)
    listener = socket.create_server(("127.0.0.1", 0))
    server = Server(create_app(service, settings), listener, drain_s=settings.drain_s)
    with answering(server):
        yield Served(service, settings, listener.getsockname()[1])
    engine.close()


@pytest.fixture(scope="session")
def client(served: Served) -> Iterator[OpenAI]:
    with OpenAI(base_url=served.url + "/v1", api_key=KEY, max_retries=0) as client:
        yield client
