"""Fine-tuning jobs: private files and the adapters made of them, behind OpenAI's API. Everything stays in one folder.

Read in this order: `files` (what clients upload), `job` (one job and its events, as they are stored), `child` (the
process of a job), `jobs` (runs the processes), `bodies` (what clients send and get), `router`.
"""
