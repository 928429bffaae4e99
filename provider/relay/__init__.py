"""Relay of effects: a helper sends its effects to the executor, hidden by a second keystream, and not to the tenant.

The tenant then downloads one matrix and not two. A block is e + m modulo 2^32: e is the effect of rows of the mask, and
m has the same rows of a second keystream of the same seed, which only the helper and the tenant can make. The executor
sees uniform blocks; it subtracts them from its answers, and the tenant adds m. Tenants choose which helper relays to
which executor (`wire`), and operators allow it: a helper dials nothing but the addresses under `[relay] to`, and an
executor accepts blocks from the certificates under `[relay] from` only. If a block is missing, the tenant fetches the
effect itself. So a block can be lost at any time, and results do not change. Read in this order:

links   makes blocks at the helper, and sends them to executors
blocks  which helpers may send blocks for which tenant; keeps them at the executor, within each tenant's share of the
        memory, and subtracts them from answers
"""
