"""`symbiosis-priv demo`: fine-tunes and generates on untrusted providers on this machine, and checks its own claims.

cli      the command
run      what it does, stage by stage
tamper   dishonest providers
claims   the figures, and the claims that are computed from them
screen   the last screen

Nothing is downloaded: `symbiosis_priv.harness` generates the texts and pretrains the base model.
"""
