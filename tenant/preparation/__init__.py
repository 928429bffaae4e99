"""Makes verification keys and facts from a checkpoint before the first session, and caches them on disk. Read in this
order:

prepared      what the tenant keeps of a base model: facts, and keys with their file format
keys          makes and caches a preparation, and loads it
opening       opens a prepared model, or prepares it
hints         what `masking = "lwe"` keeps on disk: products of a uniform matrix with the weights
own_tensors   the tensors and files that stay with the tenant: their digests, and slim checkpoints of them
"""
