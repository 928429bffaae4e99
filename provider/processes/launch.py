"""torchrun for ranks on one machine, which meet at a store that nobody else reaches:

    python -m provider.processes.launch --nproc-per-node 2 -m provider.processes.rank

Where torchrun has them meet by itself listens on all interfaces and believes everybody, and torchrun unpickles what it
finds there: whoever reached that port could run code as the provider. This store listens on loopback, and nothing in it
is pickled. Users of the same machine can still disturb the group; see docs/provider.md.
"""

from __future__ import annotations

import os
import socket
import sys

from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]  # public, and not in __all__
from torch.distributed import run as torchrun
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)

_BACKEND = "loopback"
_HOST = "127.0.0.1"
_OPTIONS = "PET_"  # torchrun's own, in the environment


class Loopback(RendezvousHandler):
    """Brings one machine together: it has met everybody once its store stands. The ranks use the same store.

    Args:
        run_id: of this group.
    """

    def __init__(self, run_id: str) -> None:
        listener = socket.create_server((_HOST, 0))
        port = listener.getsockname()[1]
        self._run_id = run_id
        self._address = RendezvousStoreInfo(_HOST, port)
        self._store = TCPStore(
            _HOST,
            port,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),  # it would listen on all interfaces
        )

    @property
    def use_agent_store(self) -> bool:
        """Else rank 0 would have a store of its own, on all interfaces."""
        return True

    def get_backend(self) -> str:
        """Its name on torchrun's command line."""
        return _BACKEND

    def get_run_id(self) -> str:
        """See `Loopback`."""
        return self._run_id

    def next_rendezvous(self) -> RendezvousInfo:
        """Rank 0 of one machine."""
        return RendezvousInfo(PrefixStore(self._run_id, self._store), 0, 1, self._address)

    def num_nodes_waiting(self) -> int:
        """There are no others."""
        return 0

    def is_closed(self) -> bool:
        """Never before its process ends."""
        return False

    def set_closed(self) -> None:
        """Nobody has to be told."""

    def shutdown(self) -> bool:
        """Nothing has to be taken down."""
        return True


def _create(parameters: RendezvousParameters) -> RendezvousHandler:
    return Loopback(parameters.run_id)


def main() -> None:
    """As torchrun's, but for options in the environment: `PET_STANDALONE` would have it listen on all interfaces."""
    for name in [name for name in os.environ if name.startswith(_OPTIONS)]:
        del os.environ[name]
    rendezvous_handler_registry.register(_BACKEND, _create)
    torchrun.main(["--rdzv-backend", _BACKEND, *sys.argv[1:]])


if __name__ == "__main__":
    main()
