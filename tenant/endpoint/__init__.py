"""The tenant's own endpoint: an HTTP server on loopback with OpenAI's API.

Read in this order: `engine` (generates tokens for many requests at once), `api` (HTTP requests and answers),
`page` (the chat page and its ledger), `tinker` (Tinker's API), `options` and `serving` (`tenant serve`), `rollouts`
(TRL's GRPO).
"""
