"""Schedules rows: batches per layer group, fair shares between tenants, bounded products, bounded waits.

A `Scheduler` holds jobs, receives the time from its caller, and uses no sockets, threads or tensors. `take` returns
pieces: rows of one or several jobs for one layer group, direction and arithmetic. A product has no more rows than
`Pace` expects to take one slice of time; a larger job is multiplied piece by piece. The tenant that was charged least
is served next (`RunnableJobs`). Times and charges are seconds of one clock; work and cost are multiply-adds.

jobs        the rows of one request, pieces of them, the expected duration of their products, and fair shares
scheduler   receives jobs, and hands out pieces
"""
