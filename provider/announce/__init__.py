"""What an executor tells registries, and what it learns from them.

announcer  announces the executor
placement  chooses its layers at the start (`layers = "auto"`)
"""
