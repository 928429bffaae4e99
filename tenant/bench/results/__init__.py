"""The figures of a benchmark: `result_file` for --json, `tables` of them for documents, and `goals` for them."""
