"""The served base model and its products: `model`."""
