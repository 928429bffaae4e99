"""The figures of a benchmark: `result_file` writes them for --json, `tables` formats them for documents, and `goals`
has limits for them."""
