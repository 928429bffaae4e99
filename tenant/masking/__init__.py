"""The masking schemes: one module and one `Scheme` each. Read `scheme`, then `pad`, then `registry`, which lists them.

A scheme for the ring derives from `SessionScheme` and answers one question: where does the effect `e = n @ W.T` of a
mask n come from? The session around it (pools of pads, verification, retries, quarantine) is the same for all schemes.
A scheme that works in another way derives from `BackendScheme` and opens a backend of its own (`backend`).
"""
