"""Connects Hugging Face models to this package. Read in this order:

hf             `RemoteConfig`, the quantization config that `from_pretrained` takes
remote_linear  the module that replaces an offloaded linear, also under `torch.compile`
connect        opens the backend that the user's options ask for, and reads base weights for methods that need them
loading        loads models, adapters and tokenizers
division       which share of the parameters is offloaded, and what stays
rounded        the plain model with the rounded weights, for comparison
adapter_limits bounds on the memory and time that an adapter folder takes
offloaded      parameters without storage
ledger         formats a session's counters
"""
