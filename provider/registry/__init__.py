"""A registry: stores the newest signed descriptor of each executor, and lists the descriptors to tenants.

Read in this order:

    config    options and limits
    store     the newest descriptor of each key, in SQLite
    rates     a rate limit for each client
    server    answers requests
    cli       the command `symbiosis-priv registry`
"""
