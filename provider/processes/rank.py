"""A process of a sharded executor (`shards`), as torchrun starts it: rank 0 serves, and the other ranks follow.

On one machine, the supervisor starts a group of ranks for the gateway (`[executor] ranks = 4`). With several machines,
`launch` starts the ranks of each machine, and rank 0 is the whole provider. Between machines, torch.distributed neither
encrypts nor authenticates: use a private network (GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME).
"""

import argparse
import os
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from provider import logs
from provider import serve as server
from provider.config.provider_toml import load
from provider.config.schema import RANKS_VARIABLE, ProviderConfig, from_json
from provider.processes import executor_process
from provider.products.model import open_store
from provider.shards import rank_group
from provider.shards.sharded import ShardedOperands
from symbiosis_priv.errors import SymbiosisError


def main() -> None:
    """Run one rank. Exits with status 1 if the group cannot be formed or has lost a rank."""
    parser = argparse.ArgumentParser(prog="provider.processes.launch ... -m provider.processes.rank")
    parser.add_argument("--config", type=Path, help="provider.toml")
    rank_group.end_with_torchrun()
    rank_group.show_rank()
    path: Path | None = parser.parse_args().config
    if (path is None) == (RANKS_VARIABLE not in os.environ):
        parser.error("name the provider's configuration: --config provider.toml")
    try:
        if path is not None:
            config = load(path)
            _run(config, lead=lambda: server.serve(config, source=path))
        else:
            text, digest, endpoint = os.environ[RANKS_VARIABLE].splitlines()
            config = from_json(text.encode())
            # rank 0 inherits stdin from the gateway through torchrun
            _run(config, lead=lambda: executor_process.serve(config, model_digest=digest, endpoint=endpoint))
    except SymbiosisError as error:
        sys.exit(f"error: rank {os.environ.get('RANK')}: {error}")


def _run(config: ProviderConfig, *, lead: Callable[[], None]) -> None:
    logs.setup(config.log_level)
    settings = config.executor
    if settings.threads:
        torch.set_num_threads(max(1, settings.threads // int(os.environ["LOCAL_WORLD_SIZE"])))
    rank_group.join(settings.device, timeout=timedelta(seconds=settings.hang_timeout_s))
    if dist.get_rank() == 0:
        lead()
    else:
        with torch.no_grad():
            ShardedOperands(open_store(config)).follow()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
