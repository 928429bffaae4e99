"""The side that serves a public base model and is not trusted with anything else.

A provider executes frozen linears on rows it cannot read (executor role) and computes the effects of masks
that it expands from a seed (helper role), one role per tenant. `gateway` is the only code that parses bytes
from the network; it hands work to an executor beside it, or over ZeroMQ to one in a process of its own. Nothing is
kept between two requests, so any provider can answer the next. This package imports `symbiosis_priv` and never
`tenant`.
"""
