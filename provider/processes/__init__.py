"""Entry points of the processes that a provider starts: `executor_process`, `cards`, `launch` (torchrun) and `rank`."""
