"""Entry points of the processes that a provider starts: `executor_process` and `cards`."""
