"""Generates tokens for many requests at once.

Read in this order: `requests` (what an engine takes and gives), `sampling` (chooses tokens), `text` (decodes them),
`answer` (puts both together for one request), then the engines: `whole` (one request at a time).
"""
