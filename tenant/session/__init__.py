"""A masked, verified session with providers. Read in this order:

session     opens, closes, counts, and notices forks
product     the happy path of one product: quantise, mask, send, open, check
pieces      a large product in several requests at once
failover    another executor or other pads, after a failure
faults      quarantine, after a wrong result
retry       what has gone wrong so far, and how long to go on
pools       pads drawn ahead
runtime     what belongs to one process: secret, pads, threads, connections

`tally` and `spans` count and measure, `published` writes figures to a file. The promises are kept in `tenant.core`.
"""
