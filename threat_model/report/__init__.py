"""A suite's figures in three formats: `tables.show` and `tables.to_html`, `as_json.to_json`."""
