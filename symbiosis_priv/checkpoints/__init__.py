"""Public checkpoints: which linears are offloaded, and their quantised weights. Read in this order:

checkpoint  tensors of a checkpoint folder, read from safetensors
forms       the forms in which published checkpoints store weights in 8 or 4 bits
bitsandbytes  makes the numbers of weights that bitsandbytes stored
widening    makes the numbers of all others
vetting     what a checkpoint folder may not contain
layers      layer groups, and layers (transformer blocks)
discovery   finds the linears of a model, and which of them share an input
manifest    the digest that pins a quantised model; widths, scales and bounds of a layer group; stacks of experts
weights     quantised weights by layer group
packed      packed weights on disk, mapped into memory
"""
