"""An executor process, as `supervisor.ExecutorProcess` starts it: a whole executor, or a rank of a group (`shards`):

    python -m provider.processes.executor_process RANK FOLDER

The first lines of stdin are the configuration, the model's digest and the socket. The gateway keeps that pipe open.
When the pipe closes, the executor ends, and the kernel kills it with the gateway. Heartbeats are written to stdout.
Ranks meet in the folder. Rank 0 serves, and the other ranks follow. Only the gateway handles signals.
"""

import gc
import os
import signal
import sys
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from provider import logs
from provider.config.schema import from_json
from provider.executor.executor import build
from provider.executor.supervisor import HEARTBEAT_S, SocketInbox
from provider.products.model import open_store
from symbiosis_priv.errors import SymbiosisError
from symbiosis_priv.system.pacing import Periodic
from symbiosis_priv.system.processes import end_with_parent, when_stdin_closes


def main() -> None:
    """Serve, or follow, until stdin closes. Exits with status 1 if the executor cannot start, or a rank was lost."""
    for ignored in (signal.SIGINT, signal.SIGTERM):
        signal.signal(ignored, signal.SIG_IGN)
    end_with_parent()
    heartbeats = os.dup(1)
    os.dup2(2, 1)  # what libraries print belongs to the log
    rank, folder = int(sys.argv[1]), Path(sys.argv[2])
    text, model_digest, endpoint = (sys.stdin.buffer.readline().decode().strip() for _ in range(3))
    config = from_json(text.encode())
    logs.setup(config.log_level)
    settings = config.executor
    if settings.threads or settings.ranks > 1:
        torch.set_num_threads(max(1, (settings.threads or os.cpu_count() or 1) // settings.ranks))
    Periodic(lambda: os.write(heartbeats, b"."), every_s=HEARTBEAT_S, name="heartbeat", at_once=True).start()
    try:
        if settings.ranks > 1:
            from provider.shards.sharded import ShardedOperands, join  # import FSDP, which only ranks need

            with suppress(OSError):
                Path("/proc/self/comm").write_text(f"rank {rank}")  # for `ps` and `top`
            join(rank, settings.ranks, folder, settings.device, timeout=timedelta(seconds=settings.hang_timeout_s))
        if rank:
            when_stdin_closes(lambda: os._exit(1))
            with torch.no_grad():
                ShardedOperands(open_store(config)).follow()
        else:
            executor = build(config, model_digest=model_digest, inbox=SocketInbox(endpoint))
            when_stdin_closes(executor.stop)
            gc.freeze()  # see `provider.serve.serve`
            executor.run()
    except SymbiosisError as error:
        sys.exit(f"error: rank {rank}: {error}" if settings.ranks > 1 else f"error: {error}")
    if settings.ranks > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
