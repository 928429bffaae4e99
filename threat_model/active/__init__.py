"""Active adversaries, which change data instead of only reading it.

lying_providers      providers that answer wrongly and observe when the tenant stops; lies about relayed effects
manipulated_folders  manipulated checkpoint, cache and adapter folders that the tenant loads
registries           registries that invent, withhold or replay executors
"""
