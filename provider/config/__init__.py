"""`provider.toml`.

schema         its fields
provider_toml  reads and writes the file
reload         reads it again while the provider runs
memory_plan    compares the memory that it asks for with what the machine has
"""
