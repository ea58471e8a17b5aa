"""Requests from an index: which route, what body, how it is framed. The same seed and index give the same bytes."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass, field
from typing import Any

import msgspec
from system.fuzz.raw_json import Pairs, Raw, to_json
from system.fuzz.templates import BODIES, FIELDS, HEADERS, MESSAGES, SAMPLING
from system.fuzz.values import Values

from kt_runtime.serve.http.route_table import Access, rule_for
from kt_runtime.serve.requests.bodies.free_json import Grammar, StopPattern

# Routes that do what they say, to everybody: what they answer is no fault, and the streams would be held up rightly.
LEFT_OUT = {
    "/pause_generation": "holds every request, as asked",
    "/continue_generation": "the other half of it",
    "/slow_down": "makes every batch wait, as asked",
    "/flush_cache": "aborts nothing, but the test flushes itself and measures then",
    "/kt/cache/clear": "waits until no request is in progress; the streams never end",
    "/v1/audio/transcriptions": "takes forms, not JSON",
    "/set_trace_level": "takes no body",
    "/abort_request": "may name every request; `clients.py` aborts its own",
}
# How often a route is asked: most often what reaches the scheduler, seldom what is refused by its name alone.
WEIGHTS = {Access.GENERATE: 2.0, Access.GUARDED: 0.5, Access.REFUSED: 0.1, Access.READ: 0.3, Access.PROBE: 0.1}
HEAVY = {
    "/generate": 24.0,
    "/v1/completions": 12.0,
    "/v1/chat/completions": 12.0,
    "/v1/responses": 4.0,
    "/v1/messages": 4.0,
}


@dataclass(frozen=True)
class Route:
    """`schema`: of the body, as the server describes it. `allowed`: of the fields that its route table lets pass."""

    method: str
    path: str
    schema: dict[str, Any] = field(hash=False)
    allowed: dict[str, Any] = field(hash=False)


def routes(openapi: dict[str, Any]) -> list[Route]:
    """Every route of the live server that takes a body of JSON or asks nothing, besides those left out."""
    found = []
    for path, operations in sorted(openapi["paths"].items()):
        for method, operation in sorted(operations.items()):
            content = operation.get("requestBody", {}).get("content", {}).get("application/json", {})
            takes_body = method in ("post", "put")
            if path not in LEFT_OUT and (takes_body or content):
                schema, method = content.get("schema", {}), method.upper()
                found.append(Route(method, path, schema, _allowed(method, path, openapi)))
    return found


def _allowed(method: str, path: str, openapi: dict[str, Any]) -> dict[str, Any]:
    """Schema of each field that may pass. The schemas that they name are added to the document's components."""
    rule = rule_for(method, path)
    if rule is None or rule.body is None:
        return {}
    (schema,), named = msgspec.json.schema_components(
        [rule.body], schema_hook=_schema_of_free, ref_template="#/components/schemas/allowed.{name}"
    )
    components = openapi.setdefault("components", {}).setdefault("schemas", {})
    components |= {f"allowed.{name}": inner for name, inner in named.items()}
    return dict(components[schema["$ref"].rsplit("/", 1)[-1]]["properties"])


@dataclass(frozen=True)
class Places:
    """What the templates' words in capitals mean on this server."""

    model: str
    peft: str
    broken: tuple[str, ...]


@dataclass(frozen=True)
class HttpCase:
    """`length`: what the client says that the body has, None: what it has. `chunks`: sent in chunks instead.

    `hangs_up_s`: the client closes its connection after so many seconds, answered or not.
    """

    name: str
    method: str
    path: str
    body: bytes
    headers: tuple[tuple[str, str], ...] = (("content-type", "application/json"),)
    length: int | None = None
    chunks: tuple[bytes, ...] | None = None
    hangs_up_s: float | None = None
    raw: bytes | None = None

    def wire(self) -> bytes:
        """The request's bytes: `raw` if there are any, else made of the other fields."""
        if self.raw is not None:
            return self.raw
        lines = [f"{self.method} {self.path} HTTP/1.1", "host: 127.0.0.1"]
        lines += [f"{name}: {value}" for name, value in self.headers]
        if self.chunks is not None:
            content = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in self.chunks) + b"0\r\n\r\n"
            lines.append("transfer-encoding: chunked")
        else:
            content = self.body
            lines.append(f"content-length: {len(self.body) if self.length is None else self.length}")
        return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + content


class Bodies:
    """`openapi`: the live server's document."""

    def __init__(self, openapi: dict[str, Any], places: Places, seed: int) -> None:
        self.routes, self.places, self.seed = routes(openapi), places, seed
        self._components = openapi.get("components", {}).get("schemas", {})
        self._weights = [_weight(route) for route in self.routes]
        self._sweep = sweep()

    def case(self, index: int) -> HttpCase:
        """Every third case is one of the sweep: a right body in which one field has one of its values."""
        randomness = random.Random(f"{self.seed}/{index}")
        values = Values(randomness, self._components)
        if index % 3 == 0:
            path, body = self._sweep[(self.seed + index // 3) % len(self._sweep)]
            return HttpCase(f"http-{self.seed}-{index}", "POST", path, to_json(self._filled(values, body)))
        route = randomness.choices(self.routes, self._weights)[0]
        document = self._filled(values, _Mutation(values, route, self._components).body())
        return self._framed(values, route, to_json(document), f"http-{self.seed}-{index}")

    def _filled(self, values: Values, value: Any) -> Any:
        """With the words in capitals replaced. PEFT: a good adapter; BROKEN: any of the bad ones."""
        if isinstance(value, str):
            if value == "BROKEN" and self.places.broken:
                return values.one(self.places.broken)
            return self.places.peft if value == "PEFT" else value.replace("MODEL", self.places.model)
        if isinstance(value, list):
            return [self._filled(values, item) for item in value]
        if isinstance(value, dict):
            return {key: self._filled(values, item) for key, item in value.items()}
        if isinstance(value, Pairs):
            return Pairs(tuple((key, self._filled(values, item)) for key, item in value.items))
        return value

    def _framed(self, values: Values, route: Route, body: bytes, name: str) -> HttpCase:
        path = re.sub(r"\{[^}]*\}", lambda _: str(values.one(("fuzz-a", "fuzz-c", "x", "%00", "..%2f"))), route.path)
        headers = [("content-type", "application/json")]
        length, chunks, hangs_up = None, None, None
        if values.chance(0.1):
            headers.append(values.one(HEADERS))
        fault = values.one(FRAMING_FAULTS) if values.chance(0.12) else None
        if fault == "type":
            headers[0] = (
                "content-type",
                values.one(
                    ("text/plain", "application/xml", "application/json; charset=utf-16", "", "multipart/form-data")
                ),
            )
        elif fault == "no type":
            del headers[0]
        elif fault == "cut":
            body = body[: values.random.randrange(len(body) + 1)]
        elif fault == "bytes":
            body = _with_broken_bytes(values, body)
        elif fault == "chunked":
            cut = values.random.randrange(len(body) + 1)
            chunks = tuple(part for part in (body[:cut], body[cut:]) if part)
        elif fault == "promises more":
            length, hangs_up = len(body) + values.one((1, 1000)), 0.5
        elif fault == "promises less":
            length = max(len(body) - values.one((1, 10)), 0)
        elif fault == "not JSON":
            body = values.one(
                (b"", b"[]", b"5", b'"x"', b"null", b"{", b"\xff\xfe", b"{}" * 200, b"\0" * 50, b"a=1&b=2")
            )
        if hangs_up is None and values.chance(0.08):
            hangs_up = values.random.random() * 0.5
        return HttpCase(name, route.method, path, body, tuple(headers), length, chunks, hangs_up)


def _weight(route: Route) -> float:
    rule = rule_for(route.method, route.path)
    return HEAVY.get(route.path) or WEIGHTS[rule.access if rule else Access.GUARDED]


FRAMING_FAULTS = ("type", "no type", "cut", "bytes", "chunked", "promises more", "promises less", "not JSON")


def _with_broken_bytes(values: Values, body: bytes) -> bytes:
    changed = bytearray(body or b"x")
    for _ in range(values.one((1, 1, 4))):
        changed[values.random.randrange(len(changed))] = values.random.randrange(256)
    return bytes(changed)


def sweep() -> list[tuple[str, dict[str, Any]]]:
    """Path and body for every value of every field, in an order that mixes them."""
    sampling = {"max_new_tokens": 8, "temperature": 1}
    made: list[tuple[str, dict[str, Any]]] = []
    for name, value in ((name, value) for name, choices in FIELDS.items() for value in choices):
        inside = {"sampling_params": {**sampling, name: value}} if name in SAMPLING else {name: value}
        given = {} if name in ("text", "input_embeds") else {"input_ids": [5, 6]}
        made.append(("/generate", {**given, "sampling_params": sampling, **inside}))
        made.append(("/v1/completions", {"model": "MODEL", "prompt": "x", "max_tokens": 6, name: value}))
        made.append(("/v1/chat/completions", {"model": "MODEL", "messages": MESSAGES, "max_tokens": 6, name: value}))
    random.Random(0).shuffle(made)
    return made


def _schema_of_free(kind: type) -> dict[str, Any]:
    """Of the fields whose inside is the client's own."""
    return {"type": "string"} if kind in (Grammar, StopPattern) else {"type": "object", "additionalProperties": True}


class _Mutation:
    """One body: a template of the route, or a body by the route's schema, changed in none to four places."""

    def __init__(self, values: Values, route: Route, components: dict[str, Any]) -> None:
        self.values, self.path = values, route.path
        schema = route.schema
        for candidate in schema.get("anyOf", [schema]):
            if "$ref" in candidate:
                schema = components.get(candidate["$ref"].rsplit("/", 1)[-1], {})
        self.schema, self.allowed = schema, route.allowed
        self.properties = {**schema.get("properties", {}), **route.allowed}

    def body(self) -> Any:
        values = self.values
        templates = BODIES.get(self.path)
        if templates and values.chance(0.85):
            body: Any = dict(values.one(templates))
        else:
            body = values.of(self.schema) if self.schema else values.anything()
        if not isinstance(body, dict):
            return body
        pairs = list(body.items())
        for _ in range(values.one((0, 1, 1, 1, 2, 2, 3, 4))):
            pairs = values.one(self._ways)(self, pairs)
        return Pairs(tuple(pairs))

    def _set(self, pairs: list[Any]) -> list[Any]:
        name = self._field()
        return [pair for pair in pairs if pair[0] != name] + [(name, self._value(name))]

    def _set_inside_sampling(self, pairs: list[Any]) -> list[Any]:
        """A field of the sampling parameters: in /generate below `sampling_params`, else beside the others."""
        name = str(self.values.one(list(SAMPLING)))
        if self.path not in ("/generate", "/vertex_generate"):
            return [*pairs, (name, self._value(name))]
        old = dict(pairs).get("sampling_params")
        made = {"max_new_tokens": 8, **(old if isinstance(old, dict) else {}), name: self._value(name)}
        return [pair for pair in pairs if pair[0] != "sampling_params"] + [("sampling_params", made)]

    def _set_wrong(self, pairs: list[Any]) -> list[Any]:
        return [*pairs, (self._field(), self.values.anything())]

    def _drop(self, pairs: list[Any]) -> list[Any]:
        return [pair for pair in pairs if self.values.chance(0.7)]

    def _twice(self, pairs: list[Any]) -> list[Any]:
        return pairs + [(name, self._value(name)) for name, _ in pairs if self.values.chance(0.3)]

    def _swap(self, pairs: list[Any]) -> list[Any]:
        shuffled = [value for _, value in pairs]
        self.values.random.shuffle(shuffled)
        return [(name, value) for (name, _), value in zip(pairs, shuffled, strict=True)]

    def _splice(self, pairs: list[Any]) -> list[Any]:
        """Fields of another route's body."""
        other = self.values.one(BODIES[self.values.one(sorted(BODIES))])
        return pairs + [pair for pair in other.items() if self.values.chance(0.5)]

    def _wrap(self, pairs: list[Any]) -> list[Any]:
        """Each field's value in a list, as a batch has it; or a value out of its list."""
        size = self.values.one((1, 2, 3))

        def wrapped(value: Any) -> Any:
            if isinstance(value, list) and self.values.chance(0.5):
                return value[0] if value else None
            return [value] * size

        return [(name, wrapped(value) if self.values.chance(0.5) else value) for name, value in pairs]

    def _inside(self, pairs: list[Any]) -> list[Any]:
        """Another leaf somewhere below."""
        return [(name, self._changed_leaf(value)) for name, value in pairs]

    def _changed_leaf(self, value: Any) -> Any:
        if isinstance(value, dict) and value:
            chosen = self.values.one(list(value))
            return {**value, chosen: self._changed_leaf(value[chosen])}
        if isinstance(value, list) and value:
            place = self.values.random.randrange(len(value))
            return [*value[:place], self._changed_leaf(value[place]), *value[place + 1 :]]
        return self.values.anything(2) if self.values.chance(0.5) else value

    _ways = (
        *(_set, _set, _set, _set_inside_sampling, _set_inside_sampling),
        *(_set_wrong, _drop, _twice, _swap, _splice, _wrap, _inside),
    )

    def _field(self) -> str:
        """Most often one that passes the route's list of fields: what is behind it is asked, too."""
        names = list(self.allowed if self.allowed and self.values.chance(0.7) else self.properties)
        if not names or self.values.chance(0.1):
            names = list(FIELDS)
        return str(self.values.one(names))

    def _value(self, name: str) -> Any:
        if name in FIELDS and self.values.chance(0.75):
            return self.values.one(FIELDS[name])
        if name in self.properties and self.values.chance(0.7):
            return self.values.of(self.properties[name])
        return Raw(b"null") if self.values.chance(0.05) else self.values.anything()
