"""`symbiosis-priv federation`: written, checked and watched from the tenant's side."""
