"""Runs products, one batch after the other. Imports torch; parses nothing from the network. Read in this order:

queues      messages between gateway and executor, and keystreams in a thread of their own
client      a running executor as the gateway sees it; sends requests for a gateway thread and waits for answers
executor    takes batches from the scheduler and computes them
member      the executor of a rank other than rank 0 that has a gateway of its own
supervisor  starts executors in this process or another one, and restarts an executor that has ended or hangs
"""
