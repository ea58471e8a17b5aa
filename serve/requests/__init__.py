"""The schemas of all request bodies, and the middleware that validates requests before SGLang parses anything.

`bodies`: `sampling`, `generate`, `chat`, `completions`, `responses`, `messages`, `scoring`, `control` have the
fields of each route's body as msgspec structs; `bounds` and `free_json` have types and bounds.
`serve/http/route_table.py` maps routes to bodies. `checks`: `checking` turns bytes into a struct or a refusal,
`middleware` does so for every request.
"""
