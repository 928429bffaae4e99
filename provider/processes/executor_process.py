"""An executor process, as `supervisor.ExecutorProcess` starts it.

The first lines of stdin are the configuration, the model's digest and the socket. The gateway keeps that pipe open.
When the pipe closes, the executor ends. Only the gateway handles signals.
"""

import gc
import signal
import sys

import torch

from provider import logs
from provider.config.schema import ProviderConfig, from_json
from provider.executor.executor import build
from provider.executor.supervisor import SocketInbox
from symbiosis_priv.errors import SymbiosisError
from symbiosis_priv.system.processes import when_stdin_closes


def main() -> None:
    """Serve until stdin closes. Exits with status 1 if the executor cannot start."""
    for ignored in (signal.SIGINT, signal.SIGTERM):
        signal.signal(ignored, signal.SIG_IGN)
    text, model_digest, endpoint = (sys.stdin.buffer.readline().decode().strip() for _ in range(3))
    config = from_json(text.encode())
    logs.setup(config.log_level)
    if config.executor.threads:
        torch.set_num_threads(config.executor.threads)
    try:
        serve(config, model_digest=model_digest, endpoint=endpoint)
    except SymbiosisError as error:
        sys.exit(f"error: {error}")


def serve(config: ProviderConfig, *, model_digest: str, endpoint: str) -> None:
    """Serve until stdin closes."""
    executor = build(config, model_digest=model_digest, inbox=SocketInbox(endpoint))
    when_stdin_closes(executor.stop)
    gc.freeze()  # see `provider.serve.serve`
    executor.run()


if __name__ == "__main__":
    main()
