"""The commands of `symbiosis-priv tenant`, a module each. What they run imports torch, so each imports its own when it
runs: `tenant --help` answers at once."""
