"""Active adversaries, which change data instead of only reading it, and those on the tenant's machine.

disk_image           the cache of a stopped tenant; all attacks on the tenant's machine
lying_providers      providers that answer wrongly and observe when the tenant stops
manipulated_folders  manipulated checkpoint, cache and adapter folders that the tenant loads
registries           registries that invent, withhold or replay executors
same_user            another process of the tenant's user
"""
