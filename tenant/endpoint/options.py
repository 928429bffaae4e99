"""The options of `tenant serve`, and the checks that need no torch."""

import importlib.util
import ipaddress
import secrets
import socket
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from typer import Option

from symbiosis_priv.checkpoints.checkpoint import resolve_adapter
from symbiosis_priv.errors import ConfigError
from symbiosis_priv.network import addresses
from symbiosis_priv.system.files import read_text
from tenant.endpoint.engine.requests import AHEAD, MOST_BUCKET

_MODULES = ("fastapi", "llguidance", "sse_starlette", "uvicorn")
_KEY_LENGTH = 16
_BACKLOG = 128


Listen = Annotated[str, Option(help="host:port; port 0 takes a free one.")]


@dataclass(frozen=True, kw_only=True)
class Serving:
    """The options of `tenant serve`. Every check raises `ConfigError`."""

    adapter: Annotated[
        list[str],
        Option("--adapter", "-a", help="NAME=FOLDER: a PEFT folder, or a hub name, and its model name; repeatable."),
    ] = field(default_factory=list)
    name: Annotated[
        str | None, Option(help="The base model's name for clients; by default its folder's or the hub's.")
    ] = None
    listen: Listen = "127.0.0.1:8000"
    public: Annotated[
        bool,
        Option(
            "--public", help="Let other machines connect to --listen. There is no TLS: put a proxy with TLS before it."
        ),
    ] = False
    host: Annotated[
        list[str], Option(help="A name by which clients reach this endpoint, besides localhost; repeatable.")
    ] = field(default_factory=list)
    api_key_file: Annotated[
        Path | None,
        Option(
            help="File with one key per line, first yours; each is a client. By default, a key is made and printed."
        ),
    ] = None
    tinker: Annotated[
        Path | None,
        Option(help="Serve Tinker's API too, for loops that fine-tune with the package tinker; checkpoints go here."),
    ] = None
    memory_mib: Annotated[int, Option("--memory", min=1, help="MiB of memory for keys and values.")] = 1024
    draft: Annotated[
        Literal["prompt"] | None,
        Option(
            help=f"Guess {AHEAD} tokens per step from earlier text, for fewer round trips. Executors see how many "
            "steps an answer takes; see --answer-bucket."
        ),
    ] = None
    answer_bucket: Annotated[
        int,
        Option(
            min=1,
            max=MOST_BUCKET,
            help="Read prompts and compute answers in multiples of this number of rows and passes, which is all that "
            "providers then see of their lengths (of prompts, 64 at most). A request may ask for a larger one.",
        ),
    ] = 1
    pace_ms: Annotated[
        int | None,
        Option(
            "--pace",
            min=1,
            max=60_000,
            help="Milliseconds from step to step, day and night. Each step has as many rows as --answer-bucket, rows "
            "without meaning where there is nothing to compute: prompts, answers and nothing look alike to providers.",
        ),
    ] = None
    pooling: Annotated[Literal["mean", "last"], Option(help="Which hidden states of a text make its embedding.")] = (
        "mean"
    )
    drain_s: Annotated[
        float, Option("--drain", min=0, help="Seconds that answers may continue after SIGTERM or Ctrl-C.")
    ] = 30.0

    def __post_init__(self) -> None:
        if self.pace_ms is None:
            return
        least = 2 if self.draft is None else AHEAD + 1
        if self.answer_bucket < least:
            raise ConfigError(f"--pace needs --answer-bucket, the number of rows of every step: at least {least} here")
        if self.tinker is not None:
            raise ConfigError("--pace holds for answers only; leave out --tinker")

    def check_for_classifier(self) -> None:
        """Refuse what only models that generate have."""
        given = {"--draft": self.draft, "--tinker": self.tinker, "--pace": self.pace_ms}
        if wrong := [name for name, value in given.items() if value]:
            raise ConfigError(f"this model classifies texts and generates none; leave out {', '.join(wrong)}")

    def model_name(self, model: str, folder: Path) -> str:
        """Return the base model's name for clients. The folder of a model of the hub has the name of a commit."""
        return self.name or (
            folder.name if Path(model).expanduser().is_dir() else model.partition("@")[0].rpartition("/")[2]
        )

    def adapters(self) -> dict[str, Path]:
        """Check the folders of the adapters, and return them by name."""
        found: dict[str, Path] = {}
        for one in self.adapter:
            name, _, folder = one.partition("=")
            if not name or not folder or name in found:
                raise ConfigError(f"--adapter {one}: write NAME=FOLDER or NAME=owner/name@revision, and each name once")
            found[name] = resolve_adapter(folder)
        return found

    def keys(self) -> tuple[str, ...]:
        """Return the keys in the key file, or a new key without a file."""
        if self.api_key_file is None:
            return (f"{'sk' if self.tinker is None else 'tml'}-{secrets.token_urlsafe(32)}",)
        keys = tuple(line.strip() for line in read_text(self.api_key_file).split("\n") if line.strip())
        if not keys or not all(key.isascii() and len(key) >= _KEY_LENGTH and len(key.split()) == 1 for key in keys):
            raise ConfigError(
                f"{self.api_key_file}: write one key per line, at least {_KEY_LENGTH} characters without spaces"
            )
        if self.tinker is not None and not all(key.startswith("tml-") for key in keys):
            raise ConfigError(f"{self.api_key_file}: with --tinker, keys begin with tml-, or the client refuses them")
        if self.api_key_file.stat().st_mode & 0o077:
            raise ConfigError(
                f"other users of this machine can read the keys in {self.api_key_file}: chmod 600 {self.api_key_file}"
            )
        return keys

    def listener(self) -> socket.socket:
        listener = addresses.listen(self.listen, backlog=_BACKLOG)
        if self.public or ipaddress.ip_address(listener.getsockname()[0]).is_loopback:
            return listener
        listener.close()
        raise ConfigError(
            f"--listen {self.listen} lets other machines connect, and prompts, answers and keys would be sent without "
            f"TLS; listen on 127.0.0.1, or put a proxy with TLS before this endpoint and pass --public"
        )


def check_installed(*, tinker: bool = False) -> None:
    """Refuse to start without the packages of the extra `serve`, or `tinker`."""
    for extra, modules in (("serve", _MODULES), ("tinker", ("tinker",) * tinker)):
        if missing := [module for module in modules if importlib.util.find_spec(module) is None]:
            raise ConfigError(
                f"{', '.join(missing)} is not installed; run in the project's clone: pip install '.[{extra}]'"
            )
