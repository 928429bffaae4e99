"""An executor that is found by registries: what it announces (`announcer`), and which layers it takes (`placement`)."""
