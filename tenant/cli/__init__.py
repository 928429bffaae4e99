"""The commands of `symbiosis-priv tenant`, one module per command; `app` has all of them, `options` what they share.

A command imports torch and transformers when it runs, so `tenant --help` does not wait for them.
"""
