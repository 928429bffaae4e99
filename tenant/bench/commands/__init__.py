"""The commands of `symbiosis-priv bench`: a module for each measurement of `tenant.bench`, of the same name.

Measurements import torch. So a command imports its own only when it runs: `bench --help` answers at once.
"""
