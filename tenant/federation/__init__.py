"""`symbiosis-priv federation`: writes and checks a tenant's federation.

Read in this order: `init` (writes the file), `probe` (asks providers, and finds what is missing), `cli`.
"""
