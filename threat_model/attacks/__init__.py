"""All attacks, in the order of the report. A new attack is a module with a class, and an entry in this list."""

from typing import Any

from symbiosis_priv.arithmetic.ring import DIRECTIONS
from threat_model.attacks.adapter import AdapterExtraction
from threat_model.attacks.averaging import Averaging
from threat_model.attacks.base import Attack, Outcome
from threat_model.attacks.candidates import CandidateSubtraction
from threat_model.attacks.clustering import BlindClustering
from threat_model.attacks.collusion import Coalition, Collusion, PartialCollusion
from threat_model.attacks.differencing import Differencing
from threat_model.attacks.gradients import BlockLabels, HeadLabels
from threat_model.attacks.other_parties import HelperAlone, MixedBatches
from threat_model.attacks.parity import EvenMasks
from threat_model.attacks.relayed import RelayedAnswers
from threat_model.attacks.repeats import RepeatedRows
from threat_model.attacks.row_scale import RowScale
from threat_model.attacks.sampler_grid import SamplerGrid
from threat_model.attacks.seeds import SeedRecovery
from threat_model.attacks.side_channels import ExecutorShapes, NeighbourCounts, NetworkShapes
from threat_model.attacks.subspace import SubspaceProjection
from threat_model.attacks.tokens import DeepLayerTokens, FirstLayerTokens
from threat_model.attacks.uniformity import Distinguisher, Uniformity

ATTACKS: tuple[Attack[Any, Any], ...] = (
    *(CandidateSubtraction(direction) for direction in DIRECTIONS),
    BlindClustering(),
    *(RepeatedRows(direction) for direction in DIRECTIONS),
    *(Differencing(direction) for direction in DIRECTIONS),
    *(RelayedAnswers(direction) for direction in DIRECTIONS),
    Averaging(),
    SubspaceProjection(),
    FirstLayerTokens(),
    DeepLayerTokens(),
    HeadLabels(),
    BlockLabels(),
    AdapterExtraction(),
    SeedRecovery(),
    SamplerGrid(),
    EvenMasks(),
    RowScale(),
    Uniformity(),
    *(Distinguisher(direction) for direction in DIRECTIONS),
    HelperAlone(),
    MixedBatches(),
    *(PartialCollusion(direction) for direction in DIRECTIONS),
    *(Coalition(direction) for direction in DIRECTIONS),
    *(Collusion(direction) for direction in DIRECTIONS),
    ExecutorShapes(),
    NetworkShapes(),
    NeighbourCounts(),
)

__all__ = ["ATTACKS", "Attack", "Outcome"]
