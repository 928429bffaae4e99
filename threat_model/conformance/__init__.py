"""Properties of an honest provider, which are tested against a running provider.

`symbiosis-priv verify` tests all properties. To test a provider from Python:

    oracle = CheckpointOracle(WeightStore(path), seed=seed)
    for outcome in verify([Subject(dialler, oracle)], PROPERTIES, examples=30, seed=seed): ...

Read in this order: `subject`, `oracle`, `trials` (also strategies for requests), `properties`, and
the checks in `connections`.

Theory of operation. A property has a name, a claim of one sentence, and a check that raises `Violation` when a request
refutes the claim. Checks draw requests with Hypothesis, which shrinks a failing request to the smallest one that still
fails; the sweep over all layers is systematic instead, and bisects a failing row. An `Oracle` computes the correct
answers from the tenant's checkpoint. Each check tests its own claim only, so that a failure names the property that the
provider breaks. A check of values ignores whether the reply is bound to its request, and the check of the binding
ignores values. A request is sent again to a busy provider. A provider that stops answering is reported as unreachable,
not as dishonest.

A pass means that *these* requests were answered correctly. A provider could still answer wrongly later; in a session,
Freivalds' check of every answer detects that (`tenant.core.verifier`). Rows and seeds are random test data: they are
not a tenant's data, and are never used as masks.
"""

from threat_model.conformance.oracle import CheckpointOracle as CheckpointOracle
from threat_model.conformance.oracle import Difference as Difference
from threat_model.conformance.oracle import Oracle as Oracle
from threat_model.conformance.oracle import PreparedOracle as PreparedOracle
from threat_model.conformance.properties import PROPERTIES as PROPERTIES
from threat_model.conformance.subject import Case as Case
from threat_model.conformance.subject import Dialler as Dialler
from threat_model.conformance.subject import NotTested as NotTested
from threat_model.conformance.subject import RawConnection as RawConnection
from threat_model.conformance.subject import Subject as Subject
from threat_model.conformance.subject import Violation as Violation
from threat_model.conformance.trials import Property as Property
from threat_model.conformance.trials import PropertyResult as PropertyResult
from threat_model.conformance.trials import Run as Run
from threat_model.conformance.trials import passed as passed
from threat_model.conformance.trials import run_property as run_property
from threat_model.conformance.trials import verify as verify
