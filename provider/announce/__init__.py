"""Announces an executor to registries (`announcer`), and chooses the layers of a new executor (`placement`)."""
