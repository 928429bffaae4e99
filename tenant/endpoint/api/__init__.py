"""HTTP requests and answers: the API of OpenAI, for the tools that speak it.

Read in this order: `bodies` and `answers` (what clients send and get), `errors`, `service` (models, prompts and
sampling), `vocabulary` (bytes of tokens, grammars), `running` (the engine's events in the event loop), `streams`,
`metrics`, `endpoint` (settings), `routes`, `guard` (who may ask), `application`, `http_server`.
"""
