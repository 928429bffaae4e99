"""A suite's figures in three formats: `as_tables.show`, `as_json.to_json`, `page.to_html`."""
