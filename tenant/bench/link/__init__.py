"""Link emulation: a network between a tenant and its providers with latency, limited bandwidth and loss.

    with open_link() as link, LocalFederation(model, folder, host=link.host) as local:
        federation = link.federation(local.federation)
        with Child("tenant", serve, federation, network=link.network) as tenant:
            link.impose(Condition(mbit_per_s=100, round_trip_ms=100))

The tenant's access is emulated: all of its providers share one bandwidth, and each direction has its own. There are two
kinds. The first one is closer to a real network:

netem      The tenant runs in a network namespace behind a pair of virtual interfaces with `tc netem` on both ends, so
the kernel's TCP runs over the kernel's emulation. It needs root and a kernel with sch_netem. proxy      A process on
loopback forwards bytes after a delay, without changing TLS. It has no requirements. TCP itself sees no delay, so there
is no slow start, and a lost segment costs one round trip.

condition  bandwidth, round trip and loss
proxy      the process that forwards bytes
netem      the network namespace and its interfaces
emulation  `open_link`
"""
