"""Runs products, one batch after the other. Imports torch; parses nothing from the network. Read in this order:

envelope         a request as the gateway hands it on
client           the gateway's end: asks an executor and waits
queues           between gateway and executor, in one process or over ZeroMQ
executor         takes batches from the scheduler and computes them
row_bytes        rows between request and product
keystream_maker  expands helpers' seeds
handle           an executor in this process or in one of its own
supervisor       restarts an executor that has died or hangs
"""
