"""Output for people in a terminal (`terminal`)."""
