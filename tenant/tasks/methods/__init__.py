"""PEFT methods that this package adds to PEFT, and LoRA's variants that compute with base weights, for split models.

Importing this package registers all methods. `from tenant import RemoteConfig` imports it too; a program that loads an
adapter into a plain model needs `import tenant.tasks.methods`. Read in this order:

layer    makes methods known to PEFT, puts their modules around linears, and refuses PEFT's that need base weights
outputs  adds to outputs: bottleneck adapters (Houlsby, Pfeiffer) and BitFit
lora     LoRA that starts from the base weight (PiSSA, OLoRA), and DoRA
sparse   product with a sparse matrix, and its gradients
pruning  learns which weights change: diff pruning, and MaskBert's binary masks
"""

from tenant.tasks.methods import lora
from tenant.tasks.methods.outputs import BitFitConfig, BottleneckConfig
from tenant.tasks.methods.pruning import DiffPruningConfig, MaskBertConfig

__all__ = ["BitFitConfig", "BottleneckConfig", "DiffPruningConfig", "MaskBertConfig", "lora"]
