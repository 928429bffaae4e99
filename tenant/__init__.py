"""The tenant's side: a Hugging Face model whose frozen linears run at providers it does not trust.

    model = AutoModelForCausalLM.from_pretrained(path, quantization_config=RemoteConfig(federation="federation.toml"))

Read in this order: `remote_linear` (where the model meets this package), `backend` (the arithmetic around a product),
`session` (masked, verified products), `noise` (pads), `verifier`, `channel` (TLS). `hf` plugs into `from_pretrained`.
"""

from tenant.config import RemoteConfig
from tenant.hf import backend_of

__all__ = ["RemoteConfig", "backend_of"]
