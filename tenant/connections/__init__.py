"""Connections to providers. Read in this order:

channel     one TLS connection: one request at a time; rows leave as `MaskedRows` only
lanes       several channels to one provider
executor    sends masked rows to an executor
helper      asks a helper for effects
notices     tells the user what is being waited for
"""
