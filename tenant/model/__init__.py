"""Connects Hugging Face models to this package. Read in this order:

hf             `RemoteConfig`, the quantization config that `from_pretrained` takes
overlap        runs parts of a batch at the same time
remote_linear  the module that replaces an offloaded linear
base_weights   reads base weights from the public checkpoint, for methods that need them
connect        opens the backend that the user's options ask for
loading        loads models, adapters and tokenizers
division       which share of the parameters is offloaded, and what stays
rounded        the plain model with the rounded weights, for comparison
adapter_limits bounds on the memory and time that an adapter folder takes
offloaded      parameters without storage
torch_compile  `torch.compile` without a graph break
ledger         formats a session's counters
"""
