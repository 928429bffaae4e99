"""`symbiosis-priv bench`: measures the cost of split execution. In each run, split and whole models are measured by
turns.

Absolute times are valid only for one machine, so compare the ratios.

Read in this order:

results           the file of --json, its tables, and goals for its figures
measured_models   the measured models
processes         processes of tenants and providers, and what they cost
steps_and_tokens  `bench step` and `bench token`
scaling           `bench scale`
masked_linear     `bench linear`
network           `bench network` (over an emulated link) and `bench bytes`
many_tenants      `bench provider` and `bench bits`
many_tasks        `bench tasks`
many_requests     `bench endpoint`
startup           `bench start`
kernels           `bench kernels`
quality           `bench quality`
cli               the commands; cli_options has their common options
"""
