"""A masked, verified session with providers. Read in this order:

    session     opens, closes, counts; and the usual path of one product: quantise, mask, send, open, check
    lane        the same path for a few rows, with all that does not change prepared
    part_queue  sends a large product as several requests at once
    failover    after a failure: asks another executor, replaces pads, quarantines a provider, or gives up
    refused     after a refused product: corrects wraps
    supply      draws pads ahead
    runtime     what belongs to one process: secret, pads, threads, connections

`tally` has the counters and measures durations, and `traffic` predicts bytes. The code that guarantees privacy and
integrity is in `tenant.core`.
"""
