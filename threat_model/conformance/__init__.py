"""What an honest provider does, as properties that a live one can be held to.

`symbiosis-priv verify` runs them all. Anybody may run them against a provider of their own:

    oracle = CheckpointOracle(WeightStore(path), seed=seed)
    for outcome in verify([Subject(dialler, oracle)], PROPERTIES, examples=30, seed=seed): ...

Theory of operation. A property has a name, a claim of one sentence, and a check that raises `Violation` when a request
refutes the claim. Checks draw requests with Hypothesis, which shrinks what it finds to the smallest request that
still fails; the sweep over all layers is systematic instead, and bisects a failing row. Answers are judged by an
`Oracle` made from the tenant's own checkpoint. Each check judges its own claim and nothing else, so that a provider
is named with the property that it breaks: values are judged whether or not the reply is bound to its request, and the
other way round. A provider that is busy is asked again; one that is gone is reported as gone, not as a liar.

Passing says that *these* requests were answered truly. A provider could answer them truly and lie later; what binds it
then is Freivalds' check of every answer in every session (`tenant.core.verifier`). Rows and seeds are random
test data: no tenant's data, and never used as masks.
"""

from threat_model.conformance.oracle import CheckpointOracle as CheckpointOracle
from threat_model.conformance.oracle import Difference as Difference
from threat_model.conformance.oracle import Oracle as Oracle
from threat_model.conformance.oracle import PreparedOracle as PreparedOracle
from threat_model.conformance.probe import Dialler as Dialler
from threat_model.conformance.probe import Probe as Probe
from threat_model.conformance.properties import PROPERTIES as PROPERTIES
from threat_model.conformance.subject import Case as Case
from threat_model.conformance.subject import NotTested as NotTested
from threat_model.conformance.subject import Subject as Subject
from threat_model.conformance.subject import Violation as Violation
from threat_model.conformance.trials import Outcome as Outcome
from threat_model.conformance.trials import Property as Property
from threat_model.conformance.trials import Run as Run
from threat_model.conformance.trials import run_property as run_property
from threat_model.conformance.trials import verify as verify
