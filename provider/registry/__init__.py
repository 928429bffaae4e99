"""A registry: stores the newest signed descriptor of each executor, and lists them to tenants.

Read in this order:

    config    options and limits
    store     the newest descriptor of each key, in SQLite
    rates     a token bucket for each client
    server    answers requests
    cli       `symbiosis-priv registry`
"""
