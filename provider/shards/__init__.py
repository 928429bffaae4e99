"""Weights sharded over ranks with FSDP2.

unit        the weights of one layer group on one rank
sharded     products over all ranks, by a plan that rank 0 broadcasts
rendezvous  connects the ranks of a group
heartbeats  notices ranks that hang
torchrun    ends ranks when torchrun ends, and torchrun when a rank hangs
"""
