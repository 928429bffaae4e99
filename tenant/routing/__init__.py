"""Chooses the providers of each request. `tenant.connections` sends the bytes. Read in this order:

routes      chooses executors and helpers, and remembers how requests ended
health      circuit breaker and measured cost of one provider
holders     the helpers that share a pad
route       one provider in one role
probing     asks providers which layers they serve
discovery   finds executors in registries
"""
