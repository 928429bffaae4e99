"""`symbiosis-priv bench`: what the split costs, measured beside what it replaces, by turns and in one run.

Absolute times say something about one machine only; the ratios are what to look at.

cli                 the commands; cli_options has what they share, kernels_cli those about kernels
steps_and_tokens    `bench step` and `bench token`, and scaling, `bench scale`: a contest of tenants with a whole and a
                    split model (contest, tenant_process)
masked_linear       `bench linear`: beside a bare TLS echo of the same bytes (echo)
slow_network        `bench network`: over an emulated link (link), beside the design's prediction (predicted_traffic)
many_tenants        `bench provider` and `bench bits`: many tenants that only send requests (request_load)
startup             `bench start`
kernels             `bench kernels` and `bench gpu`
llama               the models that are measured
children            processes that answer questions; process_costs reads what they cost
result_file         what --json writes; tables shows it, goals says what is wanted of it
"""
