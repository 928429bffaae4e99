"""`symbiosis-priv bench`: what the split costs, measured beside what it replaces, by turns and in one run.

Absolute times say something about one machine only; the ratios are what to look at.
"""
