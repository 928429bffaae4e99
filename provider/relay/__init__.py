"""Relay of effects: a helper sends its effects to the executor, hidden by a second keystream, and not to the tenant.

A block is e + m modulo 2^32: e is the effect of rows of the mask, and m has the same rows of a second keystream of the
same seed, which only the helper and the tenant can make. The executor subtracts blocks from its answers, and the tenant
adds m. If a block is missing, the tenant fetches the effect itself: results do not change. Read in this order:

links   makes blocks at the helper, and sends them to the executors that the operator lists
blocks  which helpers may send blocks for which tenant; keeps them at the executor, within each tenant's share of the
        memory, and subtracts them from answers
"""
