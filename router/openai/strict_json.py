"""How a JSON body becomes a checked object, and how a failed check becomes a short error that names the field."""

import json
import math
import re
from collections.abc import Mapping
from typing import Any, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, GetJsonSchemaHandler, ValidationError, model_validator
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, ErrorDetails, PydanticCustomError, from_json

from common.errors import InvalidRequest

BOM = b"\xef\xbb\xbf"
MAX_SHOWN = 200  # characters of what the client sent, in a reply
TAGS = ("<text>", "<texts>", "<lists>", "<items>")  # of unions; they are no part of a field's name

Neutral = Mapping[str, tuple[Any, ...]]


class Wire(BaseModel):
    """An object of a request: no type is coerced, null means absent, what is not known is refused by name."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False, frozen=True)
    HARMLESS: ClassVar[frozenset[str]] = frozenset()  # fields that are taken and have no effect
    NEUTRAL: ClassVar[Neutral] = {}  # values of unsupported fields that ask for nothing

    @model_validator(mode="before")
    @classmethod
    def _only_known_fields(cls, data: Any) -> Any:
        """Ends at the first unknown field: a body may have millions."""
        if not isinstance(data, dict):
            raise PydanticCustomError("not_an_object", "must be an object")
        for name, value in data.items():
            if name in cls.model_fields or value is None:
                continue
            neutral = cls.NEUTRAL.get(name, ())
            if any(_same(value, allowed) for allowed in neutral):
                continue
            if name not in cls.HARMLESS:
                but = f" (except {', '.join(map(json.dumps, neutral))})" if neutral else ""
                raise PydanticCustomError("unsupported", "is not supported{but}", {"key": name, "but": but})
            if not _is_finite(value):
                raise PydanticCustomError("not_finite", "must have finite numbers only", {"key": name})
        return {name: value for name, value in data.items() if name in cls.model_fields and value is not None}

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """With what the check above lets through: null for absent fields, and those without effect."""
        schema = handler(core_schema)
        described = handler.resolve_ref_schema(schema)
        required, properties = described.get("required", []), described.setdefault("properties", {})
        for name, value in properties.items():
            if name not in required and {"type": "null"} not in value.get("anyOf", []):
                properties[name] = {"anyOf": [value, {"type": "null"}]}
        properties |= {name: {"enum": [*values, None]} for name, values in cls.NEUTRAL.items()}
        properties |= {name: {} for name in sorted(cls.HARMLESS)}
        described["additionalProperties"] = {"type": "null"}
        return schema


Parsed = TypeVar("Parsed", bound=Wire)


def parse(kind: type[Parsed], body: bytes) -> Parsed:
    """The object in a body of JSON. Raises InvalidRequest, which is short, whatever was sent."""
    try:
        data = from_json(body.removeprefix(BOM), allow_inf_nan=False)
    except ValueError as error:
        raise InvalidRequest(f"the body is not valid JSON: {cut(str(error))}") from None
    if not isinstance(data, dict):
        raise InvalidRequest("the body must be a JSON object")
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        details = error.errors(include_url=False, include_input=False)[0]
    field = _field_name(details)
    raise InvalidRequest(f"{field} {_wanted(details['msg'])}", field=field)


def field_kind(value: Any) -> str:
    """The tag for a union of text, a list of texts, a list of lists and a list of anything else."""
    if isinstance(value, str):
        return "<text>"
    if not isinstance(value, list):
        return "<other>"
    first = value[0] if value else None
    return "<texts>" if isinstance(first, str) else "<lists>" if isinstance(first, list) else "<items>"


def text_or_items(value: Any) -> str:
    """The tag for a union of text and a list."""
    return "<text>" if isinstance(value, str) else "<items>" if isinstance(value, list) else "<other>"


def cut(text: str) -> str:
    return text if len(text) <= MAX_SHOWN else text[:MAX_SHOWN] + "…"


def _field_name(details: ErrorDetails) -> str:
    """Like messages[0].content[1]."""
    name = ""
    key = details.get("ctx", {}).get("key")
    for part in (*details["loc"], *([key] if key is not None else [])):
        if isinstance(part, int):
            name += f"[{part}]"
        elif part != "[key]" and part not in TAGS:
            name += f".{part}" if name else part
    return cut(name)


def _wanted(message: str) -> str:
    """pydantic's words as the rest of a sentence that begins with the field's name."""
    if message == "Field required":
        return "is required"
    return cut(re.sub(r"^(Input|String|List|Dictionary) should ", "must ", message).replace(" after validation", ""))


def _same(value: Any, other: Any) -> bool:
    """Equal as JSON has it: True is not 1, and 1.0 is."""
    return isinstance(value, bool) == isinstance(other, bool) and bool(value == other)


def _is_finite(value: Any) -> bool:
    """No number in it is too large for a float, as 1e999 is."""
    if isinstance(value, dict):
        return all(map(_is_finite, value.values()))
    if isinstance(value, list):
        return all(map(_is_finite, value))
    return not isinstance(value, float) or math.isfinite(value)
