"""Finds the linears of a model that are offloaded, and groups those that share an input. Read in this order:

linears       which modules compute a linear's product, and the parts of a mixture of experts that can be offloaded
known_values  runs a model without its weights, on tensors that have shapes and few values
tracing       runs the model on small inputs and records the calls of linears and experts
skeleton      the model class of a checkpoint, built without weights; the parameter of each stored tensor; `discover`,
              which finds the layer groups

Both sides run the discovery on the checkpoint's config alone. Linears of one block that receive the *same tensor* form
one layer group, whatever their names are: q/k/v, gate/up, a fused c_attn. There is no list of architectures; the
manifest's digest proves that both sides found the same groups. These stay with the tenant: embeddings, a tied LM head,
heads of other tasks, linears whose weight the model uses in another way, and linears that no run reaches.
"""
