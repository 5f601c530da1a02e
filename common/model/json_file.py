"""JSON files of a model directory, whose keys are checked as they are read."""

import json
import math
from pathlib import Path
from typing import Any, TypeVar

from common.errors import ModelError

Value = TypeVar("Value", int, float, bool, str)


class JsonFile:
    """A JSON object whose keys are checked as they are read; errors name the key and the file."""

    def __init__(self, path: Path, content: dict[str, Any], prefix: str = "") -> None:
        self.path = path
        self.content = content
        self.prefix = prefix  # of the names of its keys: where in the file it is

    @classmethod
    def read(cls, path: Path) -> "JsonFile":
        if not path.parent.is_dir():
            raise ModelError(f"model directory {path.parent} does not exist", field="model")
        try:
            content = json.loads(path.read_bytes())
        except FileNotFoundError:
            raise ModelError(f"{path} does not exist", field="model") from None
        except OSError as error:
            raise ModelError(f"{path} can't be read: {error.strerror}", field="model") from error
        except (ValueError, RecursionError) as error:
            raise ModelError(f"{path} is not JSON: {error}", field="model") from error
        if not isinstance(content, dict):
            raise ModelError(f"{path} is not a JSON object", field="model")
        return cls(path, content)

    def error(self, key: str, problem: str) -> ModelError:
        return ModelError(f"{self.path}: {self.prefix}{key} {problem}", field=self.prefix + key)

    def optional(self, key: str, kind: type[Value]) -> Value | None:
        """The value of a key; None where it is absent or null. An int passes for a float."""
        value = self.content.get(key)
        if value is None:
            return None
        if kind is float and type(value) is int and abs(value) < 2**53:
            return kind(value)
        if type(value) is not kind or (type(value) is float and not math.isfinite(value)):
            raise self.error(key, f"must be {_NAMES[kind]}, got {short(value)}")
        return value

    def get(self, key: str, kind: type[Value], default: Value | None = None) -> Value:
        value = self.optional(key, kind)
        if value is not None:
            return value
        if default is None:
            raise self.error(key, "is missing")
        return default

    def positive(self, key: str, default: int | None = None) -> int:
        value = self.get(key, int, default)
        if not 0 < value < 2**31:
            raise self.error(key, f"must be a positive 32-bit number, got {value}")
        return value

    def number(self, key: str, default: float | None = None, *, above: float) -> float:
        value = self.get(key, float, default)
        if value <= above:
            raise self.error(key, f"must be above {above}, got {value}")
        return value

    def child(self, key: str) -> "JsonFile | None":
        value = self.content.get(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.error(key, f"must be an object, got {short(value)}")
        return JsonFile(self.path, value, f"{self.prefix}{key}.")


_NAMES: dict[type, str] = {int: "an integer", float: "a finite number", bool: "true or false", str: "a string"}


def short(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."
