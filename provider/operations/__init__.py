"""Views for operators: `metrics` (Prometheus), `status` and `top` (the live table)."""
