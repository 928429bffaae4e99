"""Output for people: tables in a terminal (`terminal`) and small SVG pictures (`figures`)."""
