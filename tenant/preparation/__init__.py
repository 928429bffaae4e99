"""Makes verification keys and facts from a checkpoint before the first session, and caches them on disk. Read in this
order:

prepared      what the tenant keeps of a base model: facts and keys
key_files     the file format of the keys
keys          makes and caches a preparation, and loads it
opening       opens a prepared model, or prepares it
own_tensors   digests of the tensors and files that stay with the tenant
slim          writes a small checkpoint of the tenant's tensors only
"""
