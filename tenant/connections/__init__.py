"""Connections to providers: one request at a time on each, several of them to each provider."""
