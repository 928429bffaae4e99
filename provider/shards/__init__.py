"""Weights sharded over ranks with FSDP2.

shared   memory that the ranks share
sharded  products over all ranks, by a plan that rank 0 broadcasts
"""
