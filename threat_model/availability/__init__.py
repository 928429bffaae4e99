"""Attacks on availability, with real providers: abuse by other tenants, killed providers, lost ranks.

abuse     `bench abuse`: an honest tenant's requests beside the requests of abusers
chaos     `bench chaos`: providers are killed while a tenant trains and generates
ranks     `bench ranks`: a sharded executor loses a rank while tenants send requests
"""
