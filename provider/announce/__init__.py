"""What an executor tells registries: `announcer`."""
