"""Chooses the providers of each request. How bytes reach them is not its business. Read in this order:

routes      chooses executors and helpers, and remembers how requests ended
health      circuit breaker and measured cost of one provider
holders     the helpers that share a pad
route       one provider in one role
probing     asks providers what they serve
discovery   finds executors in registries
"""
