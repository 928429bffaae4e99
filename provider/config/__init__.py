"""`provider.toml`.

schema         its fields
provider_toml  reads and writes the file
reload         reads it again while the provider runs
memory_plan    compares the memory that the provider needs with the machine's memory
"""
