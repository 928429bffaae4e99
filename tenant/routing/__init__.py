"""Which providers are asked for what, and how that is found out: never how a byte reaches them."""
