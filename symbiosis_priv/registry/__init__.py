"""Registries list executors that a federation file does not name. `provider.registry` runs a registry.

Read in this order:

    descriptor   whom the members trust; an executor's signed description: address, layers and lifetime
    protocol     the requests and replies of a registry, and its client
"""
