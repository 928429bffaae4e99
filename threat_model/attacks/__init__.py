"""All attacks, in the order of the report. A new attack is a class in one of the modules, and an entry in this list."""

from typing import Any

from symbiosis_priv.arithmetic.ring import DIRECTIONS
from threat_model.attacks import tokens
from threat_model.attacks.adapter_extraction import AdapterExtraction
from threat_model.attacks.base import Attack, Outcome
from threat_model.attacks.collusion import Coalition, Collusion, HelperAlone, PartialCollusion
from threat_model.attacks.recorded_links import Harvest
from threat_model.attacks.reused_noise import CandidateSubtraction, Differencing, RepeatedRows
from threat_model.attacks.side_channels import ExecutorShapes, MixedBatches, NeighbourCounts, NetworkShapes
from threat_model.attacks.statistics_of_masks import Distinguisher, SamplerGrid, SeedRecovery, Uniformity

ATTACKS: tuple[Attack[Any, Any], ...] = (
    *(CandidateSubtraction(direction) for direction in DIRECTIONS),
    *(RepeatedRows(direction) for direction in DIRECTIONS),
    *(Differencing(direction) for direction in DIRECTIONS),
    tokens.Averaging(),
    tokens.SubspaceProjection(),
    tokens.FirstLayerTokens(),
    tokens.DeepLayerTokens(),
    tokens.HeadLabels(),
    tokens.BlockLabels(),
    AdapterExtraction(),
    SeedRecovery(),
    SamplerGrid(),
    tokens.EvenMasks(),
    tokens.RowScale(),
    Uniformity(),
    *(Distinguisher(direction) for direction in DIRECTIONS),
    HelperAlone(),
    MixedBatches(),
    *(PartialCollusion(direction) for direction in DIRECTIONS),
    *(Coalition(direction) for direction in DIRECTIONS),
    *(Collusion(direction) for direction in DIRECTIONS),
    *(Harvest(direction) for direction in DIRECTIONS),
    ExecutorShapes(),
    NetworkShapes(),
    NeighbourCounts(),
)

__all__ = ["ATTACKS", "Attack", "Outcome"]
