"""A suite's figures: `tables` in a terminal, as JSON and in the README, `page` as one HTML page with pictures."""
