"""What a request to a route may hold, as data, and the middleware that checks it before SGLang parses anything.

`sampling`, `generate`, `chat`, `completions`, `responses`, `messages`, `scoring`, `control`: the fields of each route's
body, as msgspec structs; types and bounds are in `bounds` and `free_json`. Which route has which body is in
`serve/http/route_table.py`. `checking` turns bytes into a struct or a refusal, `middleware` does so for every request.
"""
