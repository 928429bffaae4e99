"""Integer arithmetic with the same bits on both sides. Read in this order:

ring        rows to integers, and the proof that no product leaves the range
quantise    weights to integers, one scale per output channel
keystream   one-time pads from AES-256-CTR, addressed by row
lattice     masks c P + e: samplers, and products with a sparse secret
modular     inner products modulo p = 2^61 - 1, for verification
wraps       corrects what left a narrow ring, with the verification keys
segments    rows sorted by expert, and how many rows each expert has
passes      the fused passes over memory: quantise and mask; unmask, check and dequantise; and reusable memory
"""
