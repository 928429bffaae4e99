"""Where a Hugging Face model meets this package. Read in this order:

hf             `RemoteConfig`, the plug-in of `from_pretrained`
remote_linear  the module that takes the place of an offloaded linear
connect        from the user's options to a working backend
loading        loads models, adapters and tokenizers
rounded        the plain model with the rounded weights, to compare with
adapter_limits bounds on the memory and time that an adapter folder takes
offloaded      parameters without storage
compiled       `torch.compile` without a graph break
ledger         counts what a session did
"""
