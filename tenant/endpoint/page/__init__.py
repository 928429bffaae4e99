"""The page at `/`: a chat with any adapter, and beside it what the answer has cost and what each provider could see.

Read in this order: `router` (the page's files and `/ledger`), then `static/`: `index.html`, `page.js`, `events.js`,
`page.css`. Browsers get these files as they are. The page sends requests to its own server only.
"""
