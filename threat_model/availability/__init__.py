"""Attacks on availability, with provider processes: abuse by other tenants, killed providers, lost ranks.

abuse  `bench abuse`: measures an honest tenant's requests during each abuse
chaos  `bench chaos`: providers are killed while a tenant trains and generates
ranks  `bench ranks`: a sharded executor loses a rank while tenants send requests
"""
