"""`symbiosis-priv demo`: fine-tunes and generates on untrusted providers on this machine, and checks its own claims.
Read in this order:

cli      the command
run      the stages of the demo, and its dishonest providers
claims   the measurements, the claims that are computed from them, and the summary at the end

Nothing is downloaded: `symbiosis_priv.harness` generates the texts and pretrains the base model.

`serve` has `symbiosis-priv serve-demo`, which downloads a real model once.
"""
