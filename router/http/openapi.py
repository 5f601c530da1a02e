"""The API's description for machines: OpenAPI 3.1, made of the wire models."""

import functools
import json
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import JsonSchemaMode, models_json_schema

from common.version import VERSION
from router.http.pages import HealthPage, ModelCard, ModelList, Readiness, Version
from router.openai.replies import Body, ChatChoice, CompletionChoice, ErrorBody
from router.openai.requests import ChatRequest, CompletionRequest
from router.openai.tokenize import DetokenizeReply, DetokenizeRequest, TokenizeReply, TokenizeRequest

Schema = dict[str, Any]
REF = "#/components/schemas/{model}"
STREAMED = "one server-sent event: a reply with what is new in it, an error, which is the last, or [DONE]"
# path: method, summary, request, reply, whether it may be streamed
ROUTES: dict[str, tuple[str, str, type[BaseModel] | None, type[BaseModel] | None, bool]] = {
    "/v1/chat/completions": ("post", "The answer to a conversation", ChatRequest, Body[ChatChoice], True),
    "/v1/completions": ("post", "What follows a text", CompletionRequest, Body[CompletionChoice], True),
    "/tokenize": ("post", "Tokens of a prompt or of messages", TokenizeRequest, TokenizeReply, False),
    "/detokenize": ("post", "Text of tokens", DetokenizeRequest, DetokenizeReply, False),
    "/v1/models": ("get", "The served model, as a list", None, ModelList, False),
    "/v1/models/{model}": ("get", "The served model", None, ModelCard, False),
    "/version": ("get", "kvrelay's version", None, Version, False),
    "/health": ("get", "Whether the process lives", None, HealthPage, False),
    "/ready": ("get", "Whether workers could serve a request", None, Readiness, False),
    "/metrics": ("get", "Counters for Prometheus", None, None, False),
    "/openapi.json": ("get", "This description", None, None, False),
}
ERRORS = {
    400: "a field is wrong, unknown, or asks for what is not supported",
    401: "no valid API key",
    404: "no such model",
    405: "the path does not take this method",
    408: "the request arrived too slowly",
    413: "the body is too large",
    429: "too many requests wait: see Retry-After",
    500: "a defect of the server",
    503: "no worker can serve this now: see Retry-After",
    504: "the request took too long",
}
OF_ANY = (401, 405, 500)


@functools.cache
def describe(*names: str) -> str:
    """The description as JSON, of a server of the model with these names."""
    models: list[tuple[type[BaseModel], JsonSchemaMode]] = [(ErrorBody, "serialization")]
    for _, _, request, reply, _ in ROUTES.values():
        models += [(request, "validation")] if request else []
        models += [(reply, "serialization")] if reply else []
    refs, definitions = models_json_schema(models, ref_template=REF)
    for schema in definitions["$defs"].values():
        if "additionalProperties" in schema and "model" in schema["properties"]:  # a request's
            absent = [] if "model" in schema.get("required", []) else [None]
            schema["properties"]["model"] = {"enum": [*names, *absent]}
    paths: dict[str, Schema] = {}
    for path, (method, summary, request, reply, streamed) in ROUTES.items():
        operation: Schema = {"operationId": path.strip("/").replace("/", "_"), "summary": summary}
        if "{model}" in path:
            name = {"name": "model", "in": "path", "required": True, "schema": {"enum": list(names)}}
            operation["parameters"] = [name]
        if request is not None:
            content = {"application/json": {"schema": refs[request, "validation"]}}
            operation["requestBody"] = {"required": True, "content": content}
        if path in ("/health", "/ready", "/metrics"):
            operation["security"] = []
        good = {"schema": refs[reply, "serialization"]} if reply else {}
        content = {"text/plain" if path == "/metrics" else "application/json": good}
        if streamed:
            content["text/event-stream"] = {"schema": _event([good["schema"], refs[ErrorBody, "serialization"]])}
        operation["responses"] = {"200": {"description": "as asked for", "content": content}}
        error = {"application/json": {"schema": refs[ErrorBody, "serialization"]}}
        for status in _errors_of(path, method, streamed):
            operation["responses"][str(status)] = {"description": ERRORS[status], "content": error}
        if path == "/ready":
            operation["responses"]["503"] = {"description": "none could, and why", "content": content}
        paths[path] = {method: operation}
    document = {
        "openapi": "3.1.0",
        "info": {"title": "kvrelay", "version": VERSION, "description": "OpenAI's API with some of vLLM's fields"},
        "paths": paths,
        "security": [{"key": []}, {}],
        "components": {
            "schemas": definitions["$defs"],
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }
    return json.dumps(document)


def _event(contents: list[Schema]) -> Schema:
    """An event as an object of its fields, the way OpenAPI 3.2 describes streams."""
    body = {"contentMediaType": "application/json", "contentSchema": {"anyOf": contents}}
    data = {"type": "string", "anyOf": [{"const": "[DONE]"}, body]}
    return {"type": "object", "description": STREAMED, "properties": {"data": data}, "required": ["data"]}


def _errors_of(path: str, method: str, generates: bool) -> list[int]:
    if generates:
        return list(ERRORS)
    if method == "post":
        return sorted({*OF_ANY, 400, 404, 408, 413})
    return sorted({*OF_ANY, 404} if "{" in path else OF_ANY)
