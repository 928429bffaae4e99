"""Registries: how executors are found that no file lists. `provider.registry` runs one.

protocol   what is said to a registry, and what it answers
history    its log: a hash chain of descriptors, and its signed head
client     asks one, under a deadline
coverage   which layers the descriptors of a federation leave out, and which of them to take over
"""
