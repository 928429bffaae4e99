"""A registry: passes on what executors say of themselves, and keeps a log of it that others can check.

storage    the log, in SQLite
server     answers announcements and questions
replica    follows another registry's log
audit      checks logs, and compares them
cli        `symbiosis-priv registry`
"""
