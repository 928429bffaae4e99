"""The masking schemes. Read `scheme`, `backend`, `pad`, then `registry`, which has the schemes without a helper and
lists all of them. `lwe` needs one provider only (experimental). `paper_pool` is the paper's scheme, for comparison and
as a target of attacks; only the registry imports it.

A scheme for the ring derives from `SessionScheme` and answers one question: where does the effect `e = n @ W.T` of a
mask n come from? The session (pools of pads, verification, retries, quarantine) is the same for all schemes. A scheme
without a session derives from `BackendScheme` and opens its own backend (`backend`).
"""
