"""Schedules rows: batches per layer group, fair shares between tenants, bounded products, bounded waits.

Theory of operation. A `Scheduler` is a pure object: it holds jobs, receives the time from its caller, and uses no
sockets, threads or tensors. `take` returns pieces: rows of one or several jobs for one layer group, direction and
arithmetic. A product has no more rows than `Pace` expects to take one slice of time, so that no tenant waits for more
than one slice of another tenant's work; a larger job is multiplied piece by piece. The tenant that was charged least is
served next (`RunnableJobs`). The policy decides which jobs share its product, and whether jobs wait to be batched.
Times and charges are seconds of one monotonic clock; work and cost are multiply-adds.

jobs        the rows of one request, pieces of them, the expected duration of their products, and fair shares
scheduler   the policies; receives jobs and hands out pieces
"""
