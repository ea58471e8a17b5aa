"""The Tinker API at /api/v1: translates its protocol into the resident's and SGLang's. It computes nothing itself.

From the bottom: `schema` (protobuf messages), `tensors`, `batches` and `results` (what training takes and gives),
`bodies` (JSON), `futures` (answers that clients fetch later), `order` (a run's calls by seq_id), `checkpoints` (paths
and records on disk), `sampling`, `runs` (one adapter in training), `sessions` (clients and their heartbeats),
`service` (one method per endpoint), `routes`. docs/tinker.md describes it for users.
"""
