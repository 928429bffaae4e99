"""Generates tokens for many requests at once. Read in this order:

requests       what an engine takes and gives
sampling       chooses tokens
text_stream    decodes them
answer         puts both together for one request
kv             keys and values of a sequence
attention      of one sequence
row_blocks     local functions of rows, with the same bits for a row in every step
packed_model   one pass of a model over tokens of many sequences
sequence       a request in work, and its costs
speculation    guesses of tokens, for fewer round trips
turns          equal turns for clients and adapters
prefixes       keys and values of prompts that are known
continuous     the engine that computes all requests together
whole          the engine for other models: one request at a time, with `generate()`
engine_choice  chooses the engine
"""
