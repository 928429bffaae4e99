"""`symbiosis-priv federation`: commands with which a tenant writes and checks its federation."""
