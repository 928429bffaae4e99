"""Frames over TLS 1.3. Read in this order:

wire             the messages, how they are framed, and how a payload stores a matrix
tls              contexts that trust only pinned certificates
stream           TLS with many records per system call, exact sizes and deadlines, for both sides
hybrid           keys of X25519 and ML-KEM-768 together, for seeds and effects
dial             the client: opens a connection to a provider, and asks
addresses        `host:port`, and sockets that listen there
"""
