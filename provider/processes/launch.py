"""Starts the ranks of a provider with torchrun:

    python -m provider.processes.launch --nproc-per-node 2 -m provider.processes.rank
    python -m provider.processes.launch --nnodes 2 --node-rank NUMBER --nproc-per-node 1 \\
        --master-addr HOST --master-port PORT -m provider.processes.rank --config provider.toml

torchrun's own rendezvous listens on all interfaces, does not authenticate, stores everything that it receives, and
unpickles it with `--rdzv-backend c10d`. Here, ranks on one machine use a private folder, and no port is opened. With
several machines, the first machine listens at HOST:PORT only, unpickles nothing, and limits the memory for what it
receives. docs/provider.md says what a client of that port can do.
"""

import os
import socket
import sys
import tempfile
from contextlib import ExitStack
from datetime import timedelta

from torch.distributed import (  # type: ignore[attr-defined]  # public, and not in __all__
    HashStore,
    PrefixStore,
    Store,
    TCPStore,
)
from torch.distributed import run as torchrun
from torch.distributed.elastic import rendezvous
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

from provider.shards.rank_group import FOLDER_VARIABLE, limit_memory

_BACKEND = "symbiosis-priv"
_LOOPBACK = "127.0.0.1"
_OPTIONS = "PET_"  # prefix of torchrun's options in the environment
_STORE_BYTES = 512 << 20  # ranks start with torchrun's limit, and need about as much memory as torchrun
_RENDEZVOUS = timedelta(seconds=600)


class Rendezvous(StaticTCPRendezvous):
    """The rendezvous of torchrun for a fixed set of machines, of which this one is number `node`. The store is for
    torchrun's own data and, with several machines, for the ranks' rendezvous; `port` is 0 if it has none. torch's class
    would listen on all interfaces in `next_rendezvous`; its other answers fit: no machine joins later, and rank 0 uses
    this store instead of opening another one."""

    def __init__(self, run_id: str, store: Store, *, host: str, port: int, node: int, nodes: int) -> None:
        super().__init__(host, port, node, nodes, run_id, timeout=0)
        self._info = rendezvous.RendezvousInfo(
            PrefixStore(run_id, store), node, nodes, rendezvous.RendezvousStoreInfo(host, port)
        )

    def get_backend(self) -> str:
        return _BACKEND

    def next_rendezvous(self) -> rendezvous.RendezvousInfo:
        return self._info


def main() -> None:
    """Run torchrun's `main`. Options in the environment are ignored: `PET_STANDALONE` would listen on all
    interfaces."""
    for name in [name for name in os.environ if name.startswith(_OPTIONS)]:
        del os.environ[name]
    options = torchrun.parse_args(sys.argv[1:])
    _, nodes = torchrun.parse_min_max_nnodes(options.nnodes)
    with ExitStack() as stack:
        if nodes == 1:
            if FOLDER_VARIABLE not in os.environ:
                os.environ[FOLDER_VARIABLE] = stack.enter_context(tempfile.TemporaryDirectory(prefix="ranks-"))
            rendezvous.rendezvous_handler_registry.register(
                _BACKEND, lambda p: Rendezvous(p.run_id, HashStore(), host=_LOOPBACK, port=0, node=0, nodes=1)
            )
        else:
            os.environ.pop(FOLDER_VARIABLE, None)
            host, port, node = options.master_addr, options.master_port, options.node_rank

            def create(parameters: rendezvous.RendezvousParameters) -> rendezvous.RendezvousHandler:
                if node:
                    store = TCPStore(host, port, is_master=False, timeout=_RENDEZVOUS)
                else:
                    listener = socket.create_server((host, port))  # TCPStore itself would listen on all interfaces
                    limit_memory(_STORE_BYTES)
                    store = TCPStore(
                        host,
                        port,
                        is_master=True,
                        wait_for_workers=False,
                        timeout=_RENDEZVOUS,
                        master_listen_fd=listener.detach(),
                    )
                return Rendezvous(parameters.run_id, store, host=host, port=port, node=node, nodes=parameters.max_nodes)

            rendezvous.rendezvous_handler_registry.register(_BACKEND, create)
        torchrun.main(["--rdzv-backend", _BACKEND, *sys.argv[1:]])


if __name__ == "__main__":
    main()
