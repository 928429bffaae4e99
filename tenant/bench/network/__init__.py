"""`bench network` and `bench bytes`: the traffic between a tenant and its providers, and emulated links.

    with open_link() as link, LocalFederation(model, folder, host=link.host) as local:
        federation = link.federation(local.federation)
        with Child("tenant", serve, federation, network=link.network) as tenant:
            link.apply(Condition(mbit_per_s=100, round_trip_ms=100))

A link emulates the tenant's network access with latency, limited bandwidth and loss. All providers share its bandwidth,
which is separate for each direction. There are two kinds of links. The first is closer to a real network:

* netem: the tenant runs in a network namespace behind a pair of virtual interfaces with `tc netem` on both ends, so the
  kernel's TCP runs over the kernel's emulation. It needs root and a kernel with sch_netem.
* proxy: a process on loopback forwards bytes after a delay, without changing TLS. It has no requirements. TCP itself
  has no delay, so there is no slow start, and a lost segment costs one round trip.

Read in this order:

link          the interface of a link, and its condition
proxy         a process that forwards bytes
netem         a network namespace and its interfaces
emulation     `open_link`
slow_network  `bench network`, with predictions from `session.traffic`
moved_bytes   `bench bytes`, from the shapes of well-known models
"""
