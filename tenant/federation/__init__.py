"""`symbiosis-priv federation`: writes and checks a tenant's federation. `probe` asks providers, and finds what is
missing; `cli` has the commands.
"""
