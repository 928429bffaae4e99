"""Common ground of tenants and providers: exact ring arithmetic, masks, weights, wire and TLS.

Read in this order: `ring` (the arithmetic), `quantise` and `kernels` (the product), `keystream` (the masks), `weights`
(the model), `wire` (the protocol), `federation` (who does what). Imports neither `tenant` nor `provider`.
"""

__version__ = "0.1.0"
