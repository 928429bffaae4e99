"""Chooses the providers of each request. `tenant.connections` sends the bytes. Read in this order:

routes          chooses executors and helpers, and remembers how requests ended
known_provider  circuit breaker, measured cost and figures of one provider
probing         asks providers which layers they serve
discovery       finds executors in registries
"""
