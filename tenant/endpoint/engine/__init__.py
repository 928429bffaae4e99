"""Generates tokens for many requests at once.

Read in this order: `requests` (what an engine takes and gives), `sampling` (chooses tokens), `text` (decodes them),
`answer` (puts both together for one request), `kv` (keys and values of a sequence), `attention` (of one sequence), then
the engines: `whole` (one request at a time).
"""
