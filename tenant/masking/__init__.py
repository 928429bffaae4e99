"""The masking schemes. Each is one module with one `Scheme`, which says what it is; `registry` lists them.

A scheme for the ring derives from `SessionScheme` and answers one question: where does the effect `e = n @ W.T` of a
mask n come from? The session around it (noise pools, verification, retries, quarantine) is the same for all.
One that goes another way derives from `BackendScheme`, and opens a backend of its own.
"""
