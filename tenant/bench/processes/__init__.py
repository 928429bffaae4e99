"""The processes of a benchmark.

children        processes that answer questions; the other modules run their functions in them
process_costs   processor time and memory of processes
providers       what serves the measured models
tenant_process  a tenant with a model, which takes steps and generates
request_load    a tenant without a model, which only sends requests
"""
