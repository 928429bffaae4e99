"""What a provider that a benchmark has started says of itself, at its operator's address."""

from __future__ import annotations

import contextlib
import http.client
import json
from typing import Any, Final

from symbiosis_priv.errors import ConnectionLostError
from symbiosis_priv.harness.local import LocalFederation
from symbiosis_priv.network.addresses import parse_address

METRICS: Final[dict[str, object]] = {"listen": "127.0.0.1:0"}
"""`[metrics]` in its provider.toml."""
_DEADLINE_S: Final = 10.0


def status_of(local: LocalFederation, name: str) -> dict[str, Any]:
    """Its `/status`.

    Raises:
        ConnectionLostError: it does not answer.
    """
    ready = [json.loads(line) for line in local.logs(name).splitlines() if '"event": "listening"' in line][-1]
    connection = http.client.HTTPConnection(*parse_address(ready["metrics"]), timeout=_DEADLINE_S)
    try:
        with contextlib.closing(connection):
            connection.request("GET", "/status")
            status: dict[str, Any] = json.loads(connection.getresponse().read())
    except OSError as error:
        raise ConnectionLostError(f"{name} does not answer at {ready['metrics']}: {error}") from error
    return status
