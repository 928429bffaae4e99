"""Runs products, one batch after the other. Imports torch; parses nothing from the network. Read in this order:

envelope         messages from the gateway to the executor
client           sends requests for a gateway thread and waits for answers
queues           carry messages between gateway and executor, in one process or over ZeroMQ
executor         takes batches from the scheduler and computes them
row_bytes        joins and copies rows as bytes
keystream_maker  expands helpers' seeds
handle           the gateway's view of a running executor; notices one that hangs
supervisor       starts executors, and restarts an executor that has ended or hangs
"""
