"""The code that tenants and providers share: exact ring arithmetic, masks, weights, wire and TLS.

Read in this order: `ring` (the arithmetic), `quantise` and `kernels` (the product), `keystream` (the masks), `weights`
(the model), `wire` (the protocol), `federation` (the providers and their roles). Imports neither `tenant` nor
`provider`.
"""

__version__ = "0.1.0"
