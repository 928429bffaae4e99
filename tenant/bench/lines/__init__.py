"""The tenant's line to its providers, made as slow as somebody's: latency, bandwidth and loss on one machine.

    with open_line() as line, LocalFederation(model, folder, host=line.host) as local:
        federation = line.federation(local.federation)
        process = subprocess.Popen(line.command([...]))   # the tenant, which reads that federation.toml
        line.impose(Condition(mbit_per_s=100, round_trip_ms=100))

It is the tenant's access that is slow: all of its providers share one bandwidth, each direction has its own. There are
three ways to make one, best first, and `Line.kind` says which it is:

netem      The tenant in a network namespace, a pair of virtual interfaces between it and the providers, and `tc netem`
           on both ends. Linux's own TCP meets Linux's own emulation. Needs root and a kernel with sch_netem.
packets    The same namespace behind a pair of TUN interfaces, and a process that carries packets between them when they
           are due (`packets`). Linux's own TCP again: slow start, windows, retransmissions. Needs root and TUN.
proxy      A process on loopback that forwards bytes when they are due (`proxy`); TLS passes through it untouched. Needs
           nothing. TCP sees a network without delay: no slow start, and a lost segment costs a round trip only.

What does the carrying is a child that holds namespace, interfaces and sockets, and reads from a pipe of ours: however
this process ends, SIGKILL included, the child ends with it, and the kernel removes what it held.
"""

from tenant.bench.lines.condition import PETALS, Condition
from tenant.bench.lines.line import KINDS, Kind, Line, open_line

__all__ = ["KINDS", "PETALS", "Condition", "Kind", "Line", "open_line"]
