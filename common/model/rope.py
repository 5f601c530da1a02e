"""Rotary position embeddings as config.json describes them, in the terms of transformers 5.

Keys are cached rotated, so the angles of a position may not depend on how long its sequence grows. Two kinds do, in
transformers: `dynamic` changes its base beyond max_position_embeddings, `longrope` changes from its short factors to
its long ones beyond original_max_position_embeddings. Up to there each of them is one fixed embedding, and up to there
it is served: what `dynamic` and `longrope` add beyond is left out, and Rope.max_positions says where that begins.
`linear` and `yarn` reach further than the model was first trained for: by their factor, which their authors recommend
to add to a config whose max_position_embeddings stays.
"""

import math
from dataclasses import dataclass

from common.model.json_file import JsonFile, short


@dataclass(frozen=True, slots=True)
class Linear:
    """Positions divided by a factor."""

    factor: float


@dataclass(frozen=True, slots=True)
class Llama3:
    """Low frequencies divided by a factor, high ones kept, and a smooth way from these to those."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int


@dataclass(frozen=True, slots=True)
class Yarn:
    """Low frequencies divided by a factor, with a ramp over the frequencies `low` to `high`
    (https://arxiv.org/abs/2309.00071)."""

    factor: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class LongRope:
    """Each frequency divided by a factor of its own (https://arxiv.org/abs/2402.13753)."""

    factors: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Rope:
    """The rotary embedding of a layer."""

    theta: float
    dim: int  # how many of a head's dimensions are rotated, from the first on
    scaling: Linear | Llama3 | Yarn | LongRope | None = None
    attention_factor: float = 1.0  # of cosines and sines
    max_positions: int | None = None  # how far it reaches; None: max_position_embeddings


_KEYS = {
    "rope_type", "type", "rope_theta", "partial_rotary_factor", "factor", "original_max_position_embeddings",
    "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate", "short_factor", "long_factor",
    "low_freq_factor", "high_freq_factor", "finetuned",
}  # fmt: skip
_KINDS = ("default", "linear", "llama3", "yarn", "dynamic", "longrope")


def rope_parameters(file: JsonFile) -> JsonFile:
    """transformers 4 keeps scaling in rope_scaling and the rest at the top, transformers 5 all in rope_parameters."""
    scaling = file.child("rope_scaling")
    if scaling is not None and scaling.content:
        return scaling
    return file.child("rope_parameters") or JsonFile(file.path, {})


def parse_rope(file: JsonFile, parameters: JsonFile, head_dim: int, *, theta: float, partial: bool) -> Rope:
    """The embedding that `parameters` of a config describe; `theta` is used where they don't say.

    Raises ModelError for what is not supported, as is a part of each head where it is not `partial`.
    """
    for key, value in parameters.content.items():
        if key not in _KEYS and value is not None:
            raise parameters.error(key, "is not supported")
    kind = parameters.optional("rope_type", str) or parameters.optional("type", str) or "default"
    kind = "longrope" if kind == "su" else kind  # as the first Phi-3 called it
    if kind not in _KINDS:
        raise parameters.error("rope_type", f"{kind!r} is not supported (only {', '.join(_KINDS)})")
    theta = _number(parameters, "rope_theta", theta)
    dim = _rotated(file, parameters, head_dim, partial)
    told = file.positive("max_position_embeddings")
    match kind:
        case "linear":
            factor = _number(parameters, "factor")
            return Rope(theta, dim, Linear(factor), max_positions=_stretched(file, told, factor))
        case "llama3":
            return Rope(theta, dim, _llama3(file, parameters))
        case "yarn":
            return _yarn(file, parameters, theta, dim)
        case "longrope":
            return _longrope(file, parameters, theta, dim)
        case "dynamic":
            return Rope(theta, dim, max_positions=told)
    return Rope(theta, dim)


def _number(parameters: JsonFile, key: str, default: float | None = None) -> float:
    """Above 0, and of a size whose logarithms and quotients are numbers, too."""
    value = parameters.number(key, default, above=0)
    if not 1e-9 <= value <= 1e12:
        raise parameters.error(key, f"must be between 1e-9 and 1e12, got {value}")
    return value


def _rotated(file: JsonFile, parameters: JsonFile, head_dim: int, partial: bool) -> int:
    owner = parameters if parameters.content.get("partial_rotary_factor") is not None else file
    factor = _number(owner, "partial_rotary_factor", 1.0)
    if factor != 1.0 and not partial:
        raise owner.error("partial_rotary_factor", f"{factor} is not supported")
    dim = int(head_dim * factor)
    if factor > 1 or dim % 2 or dim == 0:
        raise owner.error("partial_rotary_factor", f"{factor} rotates {dim} dimensions of {head_dim}: no even number")
    return dim


def _original(file: JsonFile, parameters: JsonFile) -> int:
    """The length that the model was first trained for."""
    key = "original_max_position_embeddings"
    places = [place for place in (parameters, file) if place.content.get(key) is not None]
    values = [place.positive(key) for place in places]
    if len(set(values)) > 1:
        raise parameters.error(key, f"is {values[0]}, but {values[1]} outside of it")
    return values[0] if values else file.positive("max_position_embeddings")


def _stretched(file: JsonFile, original: int, factor: float) -> int:
    return max(file.positive("max_position_embeddings"), min(int(original * factor), 2**31 - 1))


def _llama3(file: JsonFile, parameters: JsonFile) -> Llama3:
    low, high = (_number(parameters, f"{name}_freq_factor") for name in ("low", "high"))
    if low >= high:
        raise parameters.error("low_freq_factor", f"{low} must be below high_freq_factor {high}")
    return Llama3(_number(parameters, "factor"), low, high, _original(file, parameters))


def _yarn(file: JsonFile, parameters: JsonFile, theta: float, dim: int) -> Rope:
    original = _original(file, parameters)
    factor = _number(parameters, "factor", file.positive("max_position_embeddings") / original)
    fast, slow = _number(parameters, "beta_fast", 32.0), _number(parameters, "beta_slow", 1.0)
    if fast < slow:
        raise parameters.error("beta_fast", f"{fast} must not be below beta_slow {slow}")
    if theta <= 1:
        raise parameters.error("rope_theta", f"must be above 1 with yarn, got {theta}")
    low, high = (dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta)) for turns in (fast, slow))
    if parameters.get("truncate", bool, True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if parameters.content.get("mscale") and parameters.content.get("mscale_all_dim"):  # 0 is as good as none
        suggested = _mscale(factor, _number(parameters, "mscale")) / _mscale(
            factor, _number(parameters, "mscale_all_dim")
        )
    else:
        suggested = _mscale(factor, 1.0)
    attention_factor = _number(parameters, "attention_factor", suggested)
    scaling = Yarn(factor, low, high if high != low else high + 0.001)
    return Rope(theta, dim, scaling, attention_factor, _stretched(file, original, factor))


def _mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _longrope(file: JsonFile, parameters: JsonFile, theta: float, dim: int) -> Rope:
    original = _original(file, parameters)
    factors = parameters.content.get("short_factor")
    numbers = [value for value in factors if type(value) in (int, float)] if isinstance(factors, list) else []
    if not isinstance(factors, list) or not len(factors) == len(numbers) == dim // 2 or not 0 < min(numbers) < 1e9:
        raise parameters.error("short_factor", f"must be a list of {dim // 2} numbers above 0, got {short(factors)}")
    factor = _number(parameters, "factor", file.positive("max_position_embeddings") / original)
    limit = min(original, file.positive("max_position_embeddings"))
    suggested = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(max(original, 2)))
    attention_factor = _number(parameters, "attention_factor", suggested)
    return Rope(theta, dim, LongRope(tuple(map(float, numbers))), attention_factor, limit)
