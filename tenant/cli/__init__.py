"""The commands of `symbiosis-priv tenant`, `app` lists them, and `options` has the options that they share.

A command imports torch and transformers when it runs, so `tenant --help` does not wait for them.
"""
