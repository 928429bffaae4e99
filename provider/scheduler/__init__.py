"""Which rows are multiplied next: batches per layer group, fair between tenants, bounded slices, bounded waits.

Theory of operation. A `Scheduler` is a pure object: it holds jobs, is told the time, and knows nothing of sockets,
threads or tensors. `take` hands out pieces: some rows of one or several jobs for one layer group, direction and
arithmetic. A product is never larger than what `Pace` expects to take a slice, so that nobody waits for more than one
slice of somebody else's work; a larger job is taken piece by piece. Whose turn it is follows from what everybody has
been charged (`Waiting`); what goes with it, and whether it waits for company, is the policy's. Times are seconds of one
monotonic clock, and so are charges; work and cost are multiply-adds.

jobs            one request's rows, and pieces of them
policy          what an operator chooses
scheduler       takes jobs in, hands their rows out
waiting         fair shares of stages and tenants
pace            how long products take
discipline      what a policy decides; `none` batches nothing
lockstep        everybody side by side
opportunistic   company where it pays
absent          who is expected back, for what, when
"""
