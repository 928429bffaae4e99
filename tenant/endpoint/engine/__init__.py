"""Generates tokens for many requests at once.

Read in this order: `requests` (what an engine takes and gives), then the engines.
"""
