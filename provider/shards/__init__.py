"""Weights sharded over ranks with FSDP2.

unit        the weights of one layer group on one rank
sharded     products over all ranks, by a plan that rank 0 broadcasts
rendezvous  where ranks find each other
heartbeats  notices ranks that hang
torchrun    ends with torchrun, and ends it
"""
