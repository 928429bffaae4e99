"""What an executor tells registries (`announcer`), and which layers it takes when it starts (`placement`)."""
