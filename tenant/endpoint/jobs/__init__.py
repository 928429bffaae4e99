"""Fine-tuning jobs: private files and the adapters made of them, behind OpenAI's API. Everything stays in one folder.

Read in this order: `uploads` (the files of clients), `job` (one job and its events, as they are stored, sent and
received), `child` (the process of a job), `job_runner` (runs the processes), `router`.
"""
