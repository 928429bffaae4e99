"""`symbiosis-priv federation`: commands with which a tenant writes, checks and watches its federation."""
