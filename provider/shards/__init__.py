"""Weights sharded over ranks with FSDP2.

rank_group  connects the ranks of a group, notices ranks that hang, and ends ranks and torchrun together
shared      memory that the ranks of one machine share
sharded     products over all ranks, by a plan that rank 0 broadcasts
"""
