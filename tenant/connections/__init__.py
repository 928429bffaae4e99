"""Connections to providers. Read in this order:

channel          one TLS connection, for one request at a time; it sends rows as `MaskedRows` only
notices          logs what a request waits for
executor_client  a pool of channels to an executor, for masked rows
helper_client    requests effects from a helper
"""
