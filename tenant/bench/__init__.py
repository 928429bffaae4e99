"""`symbiosis-priv bench`: measures the cost of split execution. Split and whole models take turns in one run.

Absolute times are valid for one machine only. Compare the ratios.

cli                 the commands; cli_options has their common options, kernels_cli `bench kernels`
steps_and_tokens    `bench step` and `bench token`, and scaling, `bench scale`: a contest of tenants with a whole and a
                    split model (contest, tenant_process)
masked_linear       `bench linear`: with a bare TLS echo of the same bytes (echo)
slow_network        `bench network`: over an emulated link (link), and the design's prediction (`session.traffic`)
moved_bytes         `bench bytes`: bytes of a token and a step of well-known models, from their shapes
many_tenants        `bench provider` and `bench bits`: many tenants that only send requests (request_load)
many_tasks          `bench tasks`: many tasks over one model (bert)
streams             `bench endpoint`: many answers together by the endpoint's engine, one by one with `generate()` and,
                    for a checkpoint of your own, with plain transformers
startup             `bench start`
kernels             `bench kernels`
quality             `bench quality`: rings, weight bits and bfloat16 on real weights
llama               the measured models; providers starts what serves them
children            processes that answer questions; process_costs reads their processor time and memory
result_file         the file of --json; tables renders it, goals compares it with the goals
"""
