"""Tasks of a tenant: adapters of different methods over one base model.

methods  PEFT methods of this package, and PEFT's methods that need base weights
"""
