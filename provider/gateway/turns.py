"""Whose handshake goes on next, and when: networks by turns, within a share of one core.

A handshake takes a millisecond of a core before anybody knows who is asking, so whoever connects again and again would
take cores from tenants who are being served. What handshakes take is measured and comes out of a bucket that fills at a
share of one core and holds a second's worth: a provider that is left alone for a moment takes in everybody at once.
While the bucket is in debt nobody is turned away, they wait. One network waits behind its own connections, and behind
one step of each other network. There is nothing to wait for once a handshake is over: tenants who are connected, and
what they ask, have nothing to do with it.
"""

from __future__ import annotations

from collections import OrderedDict

from provider.gateway.strangers import Stranger


class Turns:
    """See the module's text. Told the time; knows no sockets and no locks.

    Args:
        share: of one core.
        now: seconds of a monotonic clock.
    """

    def __init__(self, share: float, now: float) -> None:
        self.share = share
        self._left = share  # seconds of processor time; negative in debt
        self._when = now
        self._lines: OrderedDict[str, OrderedDict[Stranger, None]] = OrderedDict()  # whose turn it is is first

    def __len__(self) -> int:
        return sum(map(len, self._lines.values()))

    def __bool__(self) -> bool:
        return bool(self._lines)

    def wait(self, stranger: Stranger) -> None:
        """It has said something."""
        self._lines.setdefault(stranger.network, OrderedDict())[stranger] = None

    def leave(self, stranger: Stranger) -> bool:
        """Look at it no more; whether it was waiting."""
        line = self._lines.get(stranger.network, OrderedDict())
        if stranger not in line:
            return False
        del line[stranger]
        if not line:
            del self._lines[stranger.network]
        return True

    def take(self) -> Stranger:
        """Whose turn it is; the next network's is next."""
        network, line = self._lines.popitem(last=False)
        stranger, _ = line.popitem(last=False)
        if line:
            self._lines[network] = line
        return stranger

    def delay(self, now: float) -> float:
        """Seconds until the next one may be looked at."""
        self._left = min(self.share, self._left + self.share * (now - self._when))
        self._when = now
        return max(0.0, -self._left / self.share)

    def charge(self, seconds: float) -> None:
        """Processor time that a step of a handshake has taken."""
        self._left -= seconds

    @property
    def longest(self) -> tuple[str, int]:
        """The network that most are waiting of, and how many."""
        network = max(self._lines, key=lambda network: len(self._lines[network]))
        return network, len(self._lines[network])
