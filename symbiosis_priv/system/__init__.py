"""The operating system and time: files, TOML, signals, processes, pauses and shares.

files          the cache folder, and atomic replacement
private        folders that no other user can change
locks          locks of files and folders against other processes
toml           reads TOML into typed configuration, with errors that name the field
interrupts     SIGINT and SIGTERM
pacing         pauses after failures, and periodic threads
fair_share     no client holds more than stays free for others
onednn         keeps torch from AMX on machines where products would end with SIGILL
processes      starts a Python module as a process
parent_watch   ends a process when its parent has ended
"""
