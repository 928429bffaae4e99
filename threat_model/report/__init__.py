"""A suite's figures in three formats: `as_tables.show`, `as_json.to_json`, `page.to_html`.

Read in this order: `sections` (the tables), `security_table` (that of the README), `as_tables`, `as_json`, `charts`,
`page`.
"""
