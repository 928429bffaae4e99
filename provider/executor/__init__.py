"""Runs products, one batch after the other. Imports torch; parses nothing from the network. Read in this order:

queues      messages between gateway and executor, in one process or over ZeroMQ
client      a running executor as the gateway sees it; sends requests for a gateway thread and waits for answers
rows        joins rows as bytes, and expands helpers' seeds
executor    takes batches from the scheduler and computes them
supervisor  starts executors, and restarts an executor that has ended or hangs
"""
