"""What a tenant makes of a checkpoint before its first session: verification keys and facts, cached on disk.

keys          makes, caches and reads verification keys
opening       opens a prepared model, or prepares it
own_tensors   the tensors that stay with the tenant
slim          a small checkpoint of those tensors alone
"""
