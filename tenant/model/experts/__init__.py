"""Mixture of experts: the tenant's half of a layer whose expert stacks are offloaded. Read in this order:

modes     where experts run (`RemoteConfig(experts=...)`), the default, and what each mode costs
stack     the parameter that replaces an offloaded stack, with and without LoRA factors
dispatch  sends rows to their experts, one class per mode
forward   the forward pass of experts: gate, routing weights, biases, LoRA and the sum stay with the tenant
replace   replaces the stacks of a model by offloaded ones
decoding  refuses to decode while providers see routes

transformers calls experts through a registry of implementations (`transformers.integrations.moe`). `forward` registers
one for each mode. A layer takes two products from the backend: the first stack (gate and up), and the second (down).
"""
