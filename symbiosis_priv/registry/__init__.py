"""Registries list executors that a federation file does not name. `provider.registry` runs a registry.

Read in this order:

    trust        the authorities that sign providers' certificates, and the revoked certificates
    descriptor   an executor's signed description: address, layers and lifetime
    protocol     the requests and replies of a registry
    queries      sends the requests, under a deadline
    coverage     counts how much each layer is served, and chooses layers for a new provider
"""
