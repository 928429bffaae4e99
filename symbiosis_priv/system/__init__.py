"""The operating system and time: files, TOML, signals, processes, pauses and shares.

files          the cache folder, atomic replacement, locks, and folders that no other user can change
toml           reads TOML into typed configuration, with errors that name the field
interrupts     SIGINT and SIGTERM
pacing         pauses after failures, and periodic threads
fair_share     no client holds more than stays free for others
cache_key      the key that encrypts a tenant's preparation, from outside
locked         memory for a secret, and a process that other programs do not read
machine        what other programs, users, disks and devices may see of a tenant
amx            asks for AMX, the matrix units of some processors, and keeps torch from them where it would trap
processes      ends a process with its parent, or fast
"""
