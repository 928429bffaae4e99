"""A suite's figures in three formats: `terminal.show`, `as_json.to_json`, `page.to_html`."""
