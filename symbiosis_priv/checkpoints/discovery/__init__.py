"""Finds the linears of a model that are offloaded, and groups those that share an input. Read in this order:

linears       which modules compute a linear's product
architecture  the model class of a checkpoint, built without weights
stored_names  the parameter of each stored tensor
tracing       one forward pass without weights: the calls of linears, and their inputs
skeleton      `discover`: the layer groups of a checkpoint

Both sides run the discovery on the checkpoint's config alone: the architecture is built on the meta device (no memory)
and traced once. Linears of one block that receive the *same tensor* are siblings and form one group, whatever their
names are: q/k/v, gate/up, a fused c_attn. There is no list of architectures; the manifest's digest proves that both
sides found the same groups.
Embeddings, a tied LM head, heads of other tasks (classifiers) and linears that the trace does not reach
(cross-attention of a decoder without an encoder) stay with the tenant.
"""
