"""Reading a model directory's config.json and generation_config.json; needs no torch."""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from common.errors import ModelError
from common.layout import DTYPE_BYTES, KVLayout

Value = TypeVar("Value", int, float, bool, str)


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The shape of a Llama-like model, whatever its config.json calls it."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int  # tokens
    tie_word_embeddings: bool
    dtype: str  # the checkpoint's own: a key of DTYPE_BYTES

    def resolve_dtype(self, wanted: str) -> str:
        """The dtype of weights and KV for the setting `wanted`, which may be "auto"."""
        return self.dtype if wanted == "auto" else wanted

    def kv_layout(self, dtype: str) -> KVLayout:
        return KVLayout(self.num_layers, self.num_kv_heads, self.head_dim, dtype)


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """What the model's authors recommend; None where they say nothing."""

    eos_token_ids: tuple[int, ...] = ()
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None


def model_name(directory: Path) -> str:
    """What a model is called in the API and in metrics, unless it is given another name."""
    return directory.resolve().name


class JsonFile:
    """A JSON object whose keys are checked as they are read; errors name the key and the file."""

    def __init__(self, path: Path, content: dict[str, Any]) -> None:
        self.path = path
        self.content = content

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
        return ModelError(f"{self.path}: {key} {problem}", field=key)

    def optional(self, key: str, kind: type[Value]) -> Value | None:
        """The value of a key; None where it is absent or null. An int passes for a float."""
        value = self.content.get(key)
        if value is None:
            return None
        if kind is float and type(value) is int and abs(value) < 2**53:
            return kind(value)
        if type(value) is not kind or (type(value) is float and not math.isfinite(value)):
            raise self.error(key, f"must be {_NAMES[kind]}, got {_short(value)}")
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

    def child(self, key: str) -> "JsonFile | None":
        value = self.content.get(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.error(key, f"must be an object, got {_short(value)}")
        return JsonFile(self.path, value)


_NAMES: dict[type, str] = {int: "an integer", float: "a finite number", bool: "true or false", str: "a string"}


def _short(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _rope_theta(file: JsonFile) -> float:
    """transformers 4 keeps rope_theta and rope_scaling at the top, transformers 5 in rope_parameters."""
    for key in ("rope_scaling", "rope_parameters"):
        rope = file.child(key)
        if rope is None:
            continue
        kind = rope.optional("rope_type", str) or rope.optional("type", str) or "default"
        if kind != "default":
            raise file.error(key, f"of type {kind!r} is not supported (only plain rotary embeddings are)")
        if rope.get("partial_rotary_factor", float, 1.0) != 1.0:
            raise file.error(key, "with a partial_rotary_factor is not supported")
    parameters = file.child("rope_parameters")
    theta = parameters.optional("rope_theta", float) if parameters else None
    if theta is None:
        theta = file.get("rope_theta", float, 10_000.0)  # what Llama checkpoints older than the key were made with
    if theta <= 0:
        raise file.error("rope_theta", f"must be above 0, got {theta}")
    return theta


def _dtype(file: JsonFile) -> str:
    key = "dtype" if file.content.get("dtype") is not None else "torch_dtype"
    dtype = file.get(key, str, "float32").removeprefix("torch.")
    if dtype not in DTYPE_BYTES:
        raise file.error(key, f"{dtype!r} is not supported (only {', '.join(DTYPE_BYTES)})")
    return dtype


def _refuse_llama_variants(file: JsonFile) -> None:
    for key in ("attention_bias", "mlp_bias", "rope_interleaved"):
        if file.get(key, bool, False):
            raise file.error(key, "true is not supported")
    activation = file.get("hidden_act", str, "silu")
    if activation != "silu":
        raise file.error("hidden_act", f"{activation!r} is not supported (only 'silu')")
    if file.content.get("quantization_config") is not None:
        raise file.error("quantization_config", "is not supported: the weights must be float32, bfloat16 or float16")


def _llama(file: JsonFile, architecture: str) -> ModelConfig:
    _refuse_llama_variants(file)
    hidden_size, num_heads = file.positive("hidden_size"), file.positive("num_attention_heads")
    num_kv_heads = file.positive("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise file.error("num_key_value_heads", f"{num_kv_heads} does not divide num_attention_heads {num_heads}")
    if file.content.get("head_dim") is None and hidden_size % num_heads:
        raise file.error("hidden_size", f"{hidden_size} is no multiple of num_attention_heads {num_heads}")
    head_dim = file.positive("head_dim", hidden_size // num_heads)
    if head_dim % 2:
        raise file.error("head_dim", f"must be even for rotary embeddings, got {head_dim}")
    eps = file.get("rms_norm_eps", float)
    if eps <= 0:
        raise file.error("rms_norm_eps", f"must be above 0, got {eps}")
    return ModelConfig(
        architecture=architecture,
        vocab_size=file.positive("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=file.positive("intermediate_size"),
        num_layers=file.positive("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=eps,
        rope_theta=_rope_theta(file),
        max_position_embeddings=file.positive("max_position_embeddings"),
        tie_word_embeddings=file.get("tie_word_embeddings", bool, False),
        dtype=_dtype(file),
    )


# A member of the Llama family joins here, with its own checks and, where it differs, new fields of ModelConfig.
ARCHITECTURES: dict[str, Callable[[JsonFile, str], ModelConfig]] = {"LlamaForCausalLM": _llama}


def load_config(directory: Path) -> ModelConfig:
    """Reads and checks config.json. Raises ModelError that names the key at fault."""
    file = JsonFile.read(Path(directory) / "config.json")
    names = file.content.get("architectures")
    if not (isinstance(names, list) and len(names) == 1 and isinstance(names[0], str)):
        raise file.error("architectures", f"must be a list of one name, got {_short(names)}")
    if names[0] not in ARCHITECTURES:
        raise file.error("architectures", f"{names[0]!r} is not supported (only {', '.join(ARCHITECTURES)})")
    return ARCHITECTURES[names[0]](file, names[0])


def _eos_token_ids(file: JsonFile) -> tuple[int, ...] | None:
    value = file.content.get("eos_token_id")
    if value is None:
        return None
    ids = value if isinstance(value, list) else [value]
    if not all(type(token_id) is int and 0 <= token_id < 2**31 for token_id in ids):
        raise file.error("eos_token_id", f"must be a token id or a list of them, got {_short(value)}")
    return tuple(dict.fromkeys(ids))


def load_generation(directory: Path) -> GenerationDefaults:
    """generation_config.json, if there is one; EOS falls back to config.json's. Raises ModelError."""
    path = Path(directory) / "generation_config.json"
    file = JsonFile.read(path) if path.exists() else JsonFile(path, {})
    eos = _eos_token_ids(file)
    if eos is None:
        eos = _eos_token_ids(JsonFile.read(Path(directory) / "config.json")) or ()

    def number(key: str, ok: Callable[[float], bool], wanted: str) -> float | None:
        value = file.optional(key, float)
        if value is not None and not ok(value):
            raise file.error(key, f"must be {wanted}, got {value}")
        return value

    top_k = file.optional("top_k", int)
    return GenerationDefaults(
        eos_token_ids=eos,
        temperature=number("temperature", lambda v: v >= 0, "0 or more"),
        top_p=number("top_p", lambda v: 0 < v <= 1, "in (0, 1]"),
        top_k=None if top_k is None else max(top_k, 0),  # 0 and -1 both mean off
        min_p=number("min_p", lambda v: 0 <= v <= 1, "in [0, 1]"),
        repetition_penalty=number("repetition_penalty", lambda v: v > 0, "above 0"),
    )
