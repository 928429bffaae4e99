"""Serves a public base model. Tenants trust a provider with nothing else.

A provider has two roles, one per tenant. As an executor it multiplies rows that it cannot read by the frozen weights.
As a helper it expands masks from a seed and computes their effects. Only `gateway` parses what tenants send. `gateway`
passes work to an executor in the same process, or over ZeroMQ to an executor process. No request needs the state of an
earlier one, so any provider can answer it. This package imports `symbiosis_priv` and never `tenant`.
"""

import symbiosis_priv  # noqa: F401  (limits oneDNN before torch's first product)

__all__: list[str] = []
