"""OpenAI's fine-tuning API, /v1/files and /v1/fine_tuning/jobs: a job is a recipe that `kt-runtime train` runs.

From the bottom: `protocol` (bodies, rows of files, graders), `directory` (where everything is), `files` and `upload`,
`jobs` (records on disk), `events`, `recipe` (a job as a recipe and its data), `launcher` and `trainer` (the trainer's
process), `queue` (one job after the other, also across restarts of the server), `objects` (answers about jobs),
`service` (one method per endpoint), `routes`, `mount`. It computes nothing itself. docs/finetuning.md describes it for
users.
"""
