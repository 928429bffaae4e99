"""Adversaries that act instead of only looking.

lying_providers  providers that answer wrongly, and watch when the tenant stops
folders          checkpoint, cache and adapter folders left for the tenant to load
registries       registries that invent, withhold or replay executors
"""
