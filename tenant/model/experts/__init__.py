"""Mixture of experts: the tenant's half of a layer whose expert stacks are offloaded. Read in this order:

modes  where experts run (`RemoteConfig(experts=...)`), the default, what each mode costs, and a model's change for it
stack  offloaded stacks: the parameter, with and without LoRA factors; who gets which row; the forward pass

transformers calls experts through a registry of implementations (`transformers.integrations.moe`). `stack` registers
one for each mode. A layer takes two products from the backend: the first stack (gate and up), and the second (down).
"""
