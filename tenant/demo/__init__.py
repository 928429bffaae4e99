"""What `symbiosis-priv demo` needs beyond the tenant itself: its texts and its small base model.

Nothing here is downloaded: the texts are generated from a seed and the base model is pretrained on
the spot, so the demo runs on a machine without network access.
"""
