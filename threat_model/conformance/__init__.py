"""Properties of an honest provider, which are tested against a running provider (`symbiosis-priv verify`).

    oracle = Oracle(WeightStore(path), seed=seed)
    for outcome in trials.verify([Subject(peer, own, oracle, 30.0)], PROPERTIES, examples=30, seed=seed): ...

Read in this order: `subject`, `oracle`, `trials` (with strategies for requests), `properties`, `connections`.

Theory of operation. A property has a name, a claim of one sentence, and a check that raises `Violation` when a request
refutes the claim. Checks draw requests with Hypothesis, which shrinks a failing request; the sweep over all layers is
systematic instead, and bisects a failing row. An `Oracle` computes the correct answers from the tenant's checkpoint.
Each check tests its own claim only, so that a failure names the property that the provider breaks. A provider that
stops answering is reported as unreachable, not as dishonest. Rows and seeds are random, and never used as masks.
"""
