"""The processes of a benchmark. Read in this order:

children        child processes that answer questions
process_costs   processor time and memory of processes
providers       providers of the measured models
tenant_process  a tenant with a model, which takes steps and generates
request_load    a tenant without a model, which only sends requests
"""
