"""HTTP requests and answers in OpenAI's API.

Read in this order: `bodies` (what clients send), `errors`, `service` (settings, models, prompts
and sampling), `vocabulary` (bytes of tokens, grammars), `running` (the engine's events in the event loop, whole
and streamed answers), `routes`, `application` (checks of every request), `http_server`.
"""
