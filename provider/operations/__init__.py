"""What operators look at: `metrics` (Prometheus), `status`, `top` (the live table) and `health`."""
