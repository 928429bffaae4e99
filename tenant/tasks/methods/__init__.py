"""PEFT methods that this package adds to PEFT, and PEFT's methods that compute with base weights, for split models.

Importing this package registers all methods. `from tenant import RemoteConfig` imports it too; a program that loads an
adapter into a plain model needs `import tenant.tasks.methods`. Read in this order:

layer    makes methods known to PEFT, and puts their modules around linears
outputs  adds to outputs: bottleneck adapters (Houlsby, Pfeiffer) and BitFit
start    gives a method the base weight while it starts (DeLoRA, TinyLoRA); HRA rotates the input
lora     LoRA that starts from the base weight (PiSSA, OLoRA, CorDA, MiCA), and DoRA
sparse   product with a sparse matrix, and its gradients; SHiRA and SuperTuning, which change few weights
pruning  learns which weights change: diff pruning, and MaskBert's binary masks
"""

from tenant.tasks.methods import lora, sparse, start
from tenant.tasks.methods.outputs import BitFitConfig, BottleneckConfig
from tenant.tasks.methods.pruning import DiffPruningConfig, MaskBertConfig

__all__ = ["BitFitConfig", "BottleneckConfig", "DiffPruningConfig", "MaskBertConfig", "lora", "sparse", "start"]
