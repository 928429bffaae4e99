"""A masked, verified session with providers. Read in this order:

    session     opens, closes, counts, and notices forks
    product     the normal path of one product: quantise, mask, send, open, check
    part_queue  sends a large product as several requests at once
    failover    asks another executor, or replaces pads, after a failure
    corrections corrects rows whose products left a narrow ring
    faults      quarantines a provider after a wrong result
    evidence    fetches the blocks of a relayed answer that was refused
    retry       records failures of a request, and decides how long to retry
    pools       draws pads ahead
    relays      decides to which executor the effects of a pad are relayed
    runtime     what belongs to one process: secret, pads, threads, connections

`tally` counts, `spans` measures durations, and `traffic` predicts bytes. The code that guarantees privacy and integrity
is in `tenant.core`.
"""
