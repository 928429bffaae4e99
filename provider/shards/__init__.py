"""Weights sharded over ranks with FSDP2.

unit        the weights of one layer group on one rank
rank_group  connects the ranks of a group, notices ranks that hang, and ends ranks and torchrun together
sharded     products over all ranks, by a plan that rank 0 broadcasts
"""
