"""The page at `/`: a chat with any adapter, the costs of each answer, and what each provider could see.

Read in this order: `router` (the page's files and `/ledger`), then `static/`: `index.html`, `page.js` and the
modules that it imports, `page.css`. The files are served unchanged. The page sends requests only to its own server.
"""
