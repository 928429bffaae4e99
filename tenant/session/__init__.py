"""A masked, verified session with providers: one product after another, and what belongs to one process."""
