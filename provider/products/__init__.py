"""The served base model and its products: `model`; on GPUs, `graphs`."""
