"""Active adversaries, which change data instead of only reading it.

lying_providers      providers that answer wrongly and observe when the tenant stops
manipulated_folders  manipulated checkpoint, cache and adapter folders that the tenant loads
lying_relays         helpers and executors that lie about relayed effects
registries           registries that invent, withhold or replay executors
"""
