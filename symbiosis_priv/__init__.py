"""The code that tenants and providers share. Imports neither `tenant` nor `provider`. Read in this order:

arithmetic    ring, quantisation, keystreams of masks, arithmetic of the check
kernels       exact products modulo 2^32; `native` is the compiled library
checkpoints   the layer groups of a model, and their quantised weights
network       wire protocol and TLS
certificates  certificates, keys and the list of revoked certificates
federation    the providers that a tenant uses, and their roles
registry      signed descriptors of executors, and the client of a registry
errors        the tree of errors; `limits` has names and limits
cli           the command `symbiosis-priv`; `display` and `system` serve all commands
harness       whole federations on one machine, for tests, demo and benchmarks
"""

from symbiosis_priv.system import amx as _amx

__version__ = "0.5.0"

_amx.prepare()  # before torch's first product in this process and its children, and before there are other threads
