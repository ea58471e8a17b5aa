"""The Tinker API's messages: protobuf and JSON, requests and results, as the resident's batches and losses."""
