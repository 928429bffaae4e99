"""Generates tokens for many requests at once. Read in this order:

requests       requests to an engine, and their events
answer         chooses tokens, and decodes them
kv             keys and values of a sequence, and of earlier requests
attention      attention over the keys and values of sequences
packed_model   one pass of a model over tokens of many sequences
single_model   passes of a model over one sequence, for other models; and the choice between both
sequence       a request in progress: its tokens, events and costs
speculation    guesses of tokens, for fewer round trips
queued         what both engines share: a queue with equal turns for clients and adapters, and the costs of requests
continuous     the engine that computes all requests together
classifying    the engine for models that classify texts
gathered       gathers the events of a whole answer
"""
