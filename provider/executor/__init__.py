"""Runs products, one batch after the other. Imports torch; parses nothing from the network. Read in this order:

queues      messages between gateway and executor, and keystreams in a thread of their own
client      a running executor as the gateway sees it; sends requests for a gateway thread and waits for answers
executor    takes batches from the scheduler and computes them
supervisor  starts executors in this process or another one, and restarts an executor that has ended or hangs
"""
