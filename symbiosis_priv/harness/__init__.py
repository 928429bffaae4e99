"""Starts whole federations on one machine, for the demo, the benchmarks and the tests. Product code does not use it.

local            executors, helpers and registries as processes on loopback; silences expected log messages
managed_process  a process that is started, watched and stopped
strategies       Hypothesis strategies for rows and weights
base_model       pretrains a small base model on a synthetic corpus, or fetches a model from a package index
wiretaps         kill an executor in the middle of a pass
"""
