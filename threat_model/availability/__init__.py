"""Attacks on availability, with real providers: abuse by other tenants, killed providers, lost ranks.

abuse         `bench abuse`: an honest tenant's requests beside each abuse
abusers       what an abuser does
chaos         `bench chaos`: providers are killed while a tenant trains and generates
ranks         `bench ranks`: a sharded executor loses a rank while tenants send requests
request_loop  the tenants of `bench ranks`
cli           the three commands
"""
