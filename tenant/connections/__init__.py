"""Connections to providers. Read in this order:

channel          one TLS connection, for one request at a time; it sends rows as `MaskedRows` only
channel_pool     several channels to one provider
relayed_effects  finds the blocks that a request names
executor_client  sends masked rows to an executor
helper_client    requests effects from a helper
notices          logs what a request waits for
"""
