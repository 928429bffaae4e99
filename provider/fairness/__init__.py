"""Shares between clients: whose turn it is (`round_robin`), and at which rate (`token_bucket`)."""
