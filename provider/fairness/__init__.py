"""Fair shares between clients: taking turns (`round_robin`), and limited rates (`token_bucket`)."""
