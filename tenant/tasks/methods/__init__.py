"""PEFT methods that this package adds to PEFT, and PEFT's methods that compute with base weights, for split models.

Importing this package registers all methods. `from tenant import RemoteConfig` imports it too; a program that loads an
adapter into a plain model needs `import tenant.tasks.methods`. Read in this order:

registration  makes methods known to PEFT
layer         the module around a linear, and the tuner that puts it there
bottleneck    adapters on outputs (Houlsby, Pfeiffer)
bitfit        trains biases
sparse        product with a sparse matrix, and its gradients
diff_pruning  a sparse change of the weight, whose support is learned
maskbert      binary masks over the weight (MaskBert)
start         gives a method the base weight while it starts: DeLoRA, TinyLoRA
lora          LoRA that starts from the base weight: PiSSA, OLoRA, CorDA, MiCA
dora          DoRA
hra           rotates the input instead of the weight
shira         SHiRA and SuperTuning, which change few weights
"""

from tenant.tasks.methods import hra, lora, shira, start
from tenant.tasks.methods.bitfit import BitFitConfig
from tenant.tasks.methods.bottleneck import BottleneckConfig
from tenant.tasks.methods.diff_pruning import DiffPruningConfig
from tenant.tasks.methods.maskbert import MaskBertConfig

__all__ = ["BitFitConfig", "BottleneckConfig", "DiffPruningConfig", "MaskBertConfig", "hra", "lora", "shira", "start"]
