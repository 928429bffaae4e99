"""Views for operators: `metrics` (Prometheus), `status`, `top` (the live table) and `health_request`."""
