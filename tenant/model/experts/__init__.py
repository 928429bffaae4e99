"""Mixture of experts: the tenant's half of a layer whose expert stacks are offloaded. Read in this order:

modes    where experts run (`RemoteConfig(experts=...)`), the default, and what each mode costs
stack    the parameter that stands for an offloaded stack, with and without LoRA factors
forward  the forward pass of experts: gate, routing weights, biases, LoRA and the sum stay here
replace  puts the stand-ins into a model

transformers calls experts through a registry of implementations (`transformers.integrations.moe`). `forward` registers
one that takes two products per layer from the backend: the first stack (gate and up), and the second (down).
"""
