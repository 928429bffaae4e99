"""Attacks on availability: `bench abuse` measures an honest tenant's requests while others abuse its provider."""
