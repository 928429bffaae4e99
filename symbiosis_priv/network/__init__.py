"""Frames over TLS 1.3. Read in this order:

wire        the messages, and how they are framed
tls         contexts that trust only pinned certificates
records     TLS records in memory
dial        opens a connection and reads frames under a deadline
addresses   `host:port`
"""
