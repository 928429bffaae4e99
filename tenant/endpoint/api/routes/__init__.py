"""The routes of the API, one module per kind of request.

Read in this order: `completions` (texts to continue, embeddings), `chat` (messages; `tools` finds calls in answers),
`responses` (chats in another form), `models` (models and health).
"""
