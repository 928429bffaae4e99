"""A federation on this machine: provider processes with TLS and certificates, which stop when the `with` block ends.

    with LocalFederation(Path("model"), Path("run")) as local:
        config = RemoteConfig(federation=local.federation)
        model = AutoModelForCausalLM.from_pretrained("model", quantization_config=config)

The demo, benchmarks and tests use it; `kill` and `restart` show what happens when a provider fails. Providers are
started through the command line (`managed_process`), as by an operator, and none of their code is imported.
"""

import contextlib
import http.client
import json
import logging
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, asdict, dataclass, field
from pathlib import Path
from typing import Any, Final, Self

from symbiosis_priv.certificates.issuing import DEFAULT_HOSTS, create_authority, issue
from symbiosis_priv.certificates.reading import Identity, Kind
from symbiosis_priv.checkpoints.checkpoint import resolve
from symbiosis_priv.checkpoints.layers import DEFAULT_SCOPE, Scope
from symbiosis_priv.checkpoints.weights import WeightStore
from symbiosis_priv.errors import ConfigError, ConnectionLostError, DeadlineExceededError
from symbiosis_priv.federation import federation_text
from symbiosis_priv.harness.managed_process import ManagedProcess
from symbiosis_priv.limits import DEFAULT_WEIGHT_BITS
from symbiosis_priv.network.addresses import parse_address
from symbiosis_priv.network.wire import Role
from symbiosis_priv.registry.descriptor import Trust, verify
from symbiosis_priv.registry.protocol import RegistryClient
from symbiosis_priv.system.files import write_atomically
from symbiosis_priv.system.toml import toml_table


@contextmanager
def silenced(name: str) -> Iterator[None]:
    """Drop the warnings and errors of a package or module inside this block, which provokes them."""
    logger = logging.getLogger(name)
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(before)


METRICS: Final[dict[str, object]] = {"listen": "127.0.0.1:0"}  # `[metrics]` of a provider whose `status` is read

_POLL_S, _STATUS_S = 0.02, 10.0
_REGISTRY = "registry"

ProviderOptions = Mapping[str, Mapping[str, object]]
"""Tables of provider.toml, for every provider: `{"executor": {"threads": 1}, "limits": {"max_rows": 64}}`."""


@dataclass
class _Provider:
    name: str
    role: Role
    identity: Identity
    service: ManagedProcess
    addresses: list[str]  # a restarted provider uses the same ports
    layers: str | None = None
    listed: bool = True


@dataclass(eq=False)
class LocalFederation:
    """Executors and helpers as separate processes, each with its own key and operator.

    Everything is written into `directory`: `keys/`, one `NAME.toml` and `NAME.log` per provider, the tenant's
    `federation.toml` (`federation`), the quantised weights. Providers are called `executor` and `helper`, or
    `executor-1`, `executor-2`, ... where there are several.

        LocalFederation(model, run, executors=3, layers={"executor-1": "0-15", "executor-2": "16-31"})
    """

    model: Path
    directory: Path  # new or empty; it is not deleted
    _: KW_ONLY
    helpers: int = 1
    executors: int = 1
    weight_bits: int = DEFAULT_WEIGHT_BITS
    scope: Scope = DEFAULT_SCOPE
    layers: Mapping[str, str] = field(default_factory=dict)  # ranges by providers' names; the others serve all layers
    pad_helpers: int | None = None  # number of helpers that share each pad; all if None
    registry: bool = False  # a registry runs, too, where executors announce themselves and tenants find unlisted ones
    host: str = "127.0.0.1"  # IP address at which providers listen
    cache: Path | None = None  # of quantised weights; by default in `directory`
    provider_options: ProviderOptions = field(default_factory=dict)
    deadline_s: float = 120.0  # for all providers to become ready

    def __post_init__(self) -> None:
        self.model, self.directory = resolve(self.model), self.directory.resolve()
        self.federation, self._keys = self.directory / "federation.toml", self.directory / "keys"
        self.cache = (self.cache or self.directory / "cache").resolve()
        self.registry_address = ""
        self._registry = ManagedProcess("the registry", self.directory, _REGISTRY) if self.registry else None
        self._providers: dict[str, _Provider] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the providers, executors first."""
        return tuple(self._providers)

    def address(self, name: str) -> str:
        """`host:port` of a provider."""
        return self._provider(name).addresses[0]

    def pid(self, name: str) -> int | None:
        """Process id of a provider, None while it is killed."""
        return self._provider(name).service.pid

    def logs(self, name: str) -> str:
        """The output of a provider or the registry since the first start."""
        if name == _REGISTRY and self._registry is not None:
            return self._registry.logs()
        return self._provider(name).service.logs()

    def status(self, name: str) -> dict[str, Any]:
        """The `/status` of a provider that was started with `{"metrics": METRICS}`. Raises `ConnectionLostError`: the
        provider does not answer."""
        ready = [json.loads(line) for line in self.logs(name).split("\n") if '"event": "listening"' in line][-1]
        connection = http.client.HTTPConnection(*parse_address(ready["metrics"]), timeout=_STATUS_S)
        try:
            with contextlib.closing(connection):
                connection.request("GET", "/status")
                status: dict[str, Any] = json.loads(connection.getresponse().read())
        except OSError as error:
            raise ConnectionLostError(f"{name} does not answer at {ready['metrics']}: {error}") from error
        return status

    def issue_tenant(self, name: str) -> Identity:
        return issue(self._keys, authority=self._authority, kind=Kind.TENANT, name=name)

    def kill(self, name: str) -> None:
        """End a provider with SIGKILL, like a crash."""
        self._provider(name).service.kill()

    def restart(self, name: str) -> None:
        """Kill a provider if it runs, and start it again at the same address; returns when it is ready."""
        self.kill(name)
        provider = self._provider(name)
        self._launch(provider)
        provider.addresses = provider.service.wait_ready(time.monotonic() + self.deadline_s)

    def start(self) -> Self:
        """Issue certificates, start every provider, write `federation.toml`. Raises `ConfigError`: a provider ended
        during its start, and the message quotes its log; `DeadlineExceededError`: a provider was not ready in time; and
        the errors of `WeightStore.manifest` and `create_authority`."""
        store = WeightStore(self.model, weight_bits=self.weight_bits, scope=self.scope, cache=self.cache)
        self._digest = store.manifest().digest  # here, once: providers find it in the cache
        self._authority = create_authority(self._keys)
        self._tenant = self.issue_tenant("tenant")
        counts: dict[Role, int] = {"executor": self.executors, "helper": self.helpers}
        for role, count in counts.items():
            for i in range(count):
                name = role if count == 1 else f"{role}-{i + 1}"
                self._make(name, role, self.layers.get(name))
        deadline = time.monotonic() + self.deadline_s
        try:
            if (service := self._registry) is not None:
                identity = self._issue(_REGISTRY)
                options = {
                    "--listen": f"{self.host}:0",
                    "--certificate": identity.certificate,
                    "--key": identity.key,
                    "--authority": self._authority.certificate,
                }
                service.launch(["registry", "serve", *(str(word) for pair in options.items() for word in pair)])
                (self.registry_address,) = service.wait_ready(deadline)
            self._run(list(self._providers.values()), deadline)
            self._write_federation()
        except BaseException:
            self.stop()
            raise
        return self

    def add(self, name: str, role: Role = "executor", *, layers: str | None = None, listed: bool = True) -> None:
        """Start one more provider and add it to `federation.toml`, or if it is not `listed`, only to the registry. It
        serves all layers if `layers` is None. Raises what `start` raises, and `ConfigError`: the name is taken."""
        if name in self._providers:
            raise ConfigError(f"there is a provider {name!r} here: give the new one a name of its own")
        provider = self._make(name, role, layers, listed=listed)
        try:
            self._run([provider], time.monotonic() + self.deadline_s)
        except BaseException:
            self.kill(name)
            del self._providers[name]
            provider.identity.certificate.unlink()
            provider.identity.key.unlink()
            raise
        self._write_federation()

    def stop(self) -> None:
        """Ask every provider to stop, and kill those that do not."""
        for provider in self._providers.values():
            provider.service.terminate()
        for provider in self._providers.values():
            provider.service.stop()
        if self._registry is not None:
            self._registry.kill()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _provider(self, name: str) -> _Provider:
        try:
            return self._providers[name]
        except KeyError:
            known = ", ".join(self._providers) or "none yet"
            raise ConfigError(f"no provider {name!r} here; there are {known}") from None

    def _make(self, name: str, role: Role, layers: str | None, *, listed: bool = True) -> _Provider:
        service = ManagedProcess(f"provider {name!r}", self.directory, name)
        provider = _Provider(name, role, self._issue(name), service, [f"{self.host}:0"], layers, listed)
        self._providers[name] = provider
        return provider

    def _issue(self, name: str) -> Identity:
        hosts, operator = list(dict.fromkeys((*DEFAULT_HOSTS, self.host))), f"operator of {name}"
        return issue(
            self._keys, authority=self._authority, kind=Kind.PROVIDER, name=name, hosts=hosts, operator=operator
        )

    def _write_federation(self) -> None:
        pads = {} if self.pad_helpers is None else {"helpers": self.pad_helpers}
        registry = {"addresses": [self.registry_address], "authority": self._authority.certificate}
        entries = [
            {"name": p.name, "operator": f"operator of {p.name}", "role": p.role}
            | {"address": p.addresses if len(p.addresses) > 1 else p.addresses[0]}
            | {"certificate": p.identity.certificate, **({"layers": p.layers} if p.layers else {})}
            for p in self._providers.values()
            if p.listed
        ]
        text = federation_text(
            entries,
            digest=self._digest,
            certificate=self._tenant.certificate,
            key=self._tenant.key,
            weight_bits=self.weight_bits,
            scope=self.scope,
            pads=pads,
            registry=registry if self.registry else None,
        )
        write_atomically(self.federation, text.encode())

    def _launch(self, provider: _Provider) -> None:
        config = self.directory / f"{provider.name}.toml"
        config.write_text(self._provider_toml(provider), encoding="utf-8")
        provider.service.launch(["provider", "serve", "--config", str(config)])

    def _run(self, providers: Sequence[_Provider], deadline: float) -> None:
        """Start providers, and wait until they are ready and the registry, if there is one, lists the executors."""
        for provider in providers:
            self._launch(provider)
        for provider in providers:
            provider.addresses = provider.service.wait_ready(deadline)
            while self.registry and provider.role == "executor":
                trust = Trust.load(self._authority.certificate)
                with RegistryClient(self.registry_address, trust, deadline_s=self.deadline_s) as registry:
                    found = [verify(data, trust, now=time.time()) for data in registry.list(self._digest)]
                if provider.addresses[0] in (announced.descriptor.address for announced in found):
                    break
                if time.monotonic() > deadline:
                    raise DeadlineExceededError(
                        f"the registry did not list provider {provider.name!r} within {self.deadline_s:g} s; "
                        f"LocalFederation(deadline_s=...) waits longer"
                    )
                time.sleep(_POLL_S)

    def _provider_toml(self, provider: _Provider) -> str:
        tables: dict[str, dict[str, object]] = {
            "model": {"checkpoint": self.model, "weight_bits": self.weight_bits, "cache": self.cache},
            # all providers share this machine's cores
            "executor": {"threads": max(1, (os.cpu_count() or 1) // len(self._providers))},
            "tls": {**asdict(provider.identity), "tenant_authority": self._keys / "authority.pem"},
        }
        tables["model"] |= asdict(self.scope)
        if provider.layers is not None:
            tables["model"]["layers"] = provider.layers
        if self.registry and provider.role == "executor":
            tables["registry"] = {"announce": [self.registry_address], "authority": self._authority.certificate}
        for table, entries in self.provider_options.items():
            tables.setdefault(table, {}).update(entries)
        head = toml_table("", name=provider.name, listen=provider.addresses[0], roles=[provider.role])
        return "\n".join([head, *(toml_table(f"[{name}]", **entries) for name, entries in tables.items())])
