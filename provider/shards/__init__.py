"""Weights sharded over ranks with FSDP2.

unit        the weights of one layer group on one rank
sharded     products over all ranks, by a plan that rank 0 broadcasts
heartbeat   notices ranks that hang
"""
