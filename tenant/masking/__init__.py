"""The masking schemes: each module has one `Scheme`. Read `scheme`, `backend`, `pad`, then `registry`, which lists
the schemes. The others are `none`, `local`, `simulate` and `paper_pool`.

A scheme for the ring derives from `SessionScheme` and answers one question: where does the effect `e = n @ W.T` of a
mask n come from? The session (pools of pads, verification, retries, quarantine) is the same for all schemes. A scheme
without a session derives from `BackendScheme` and opens its own backend (`backend`).
"""
