"""How tenants find executors that their federation file does not list. `provider.registry` runs a registry.

Read in this order:

    trust        which authorities sign providers' certificates, and which certificates were revoked
    descriptor   what an executor says about itself, signed
    protocol     the requests and replies of a registry
    queries      sends the requests, under a deadline
    coverage     which layers a federation lacks, and which of them a new provider should serve
"""
