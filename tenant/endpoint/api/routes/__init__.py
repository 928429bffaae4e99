"""The routes of the API, one module per kind of request.

Read in this order: `completions` (texts to continue), `chat` (messages; `tools` finds the calls in an answer),
`responses` (chats in another form), `embeddings`, `models` (models, adapters at run time, health and metrics).
"""
