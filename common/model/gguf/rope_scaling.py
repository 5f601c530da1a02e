"""A GGUF file's rotary embedding in the terms of config.json."""

import math
import struct
from typing import Any

from common.model.gguf.header import GgufFile

HfConfig = dict[str, Any]

# Rotary scaling of Llama 3.1 to 3.3: https://arxiv.org/abs/2407.21783, section 3.4; the file has its result alone.
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
_FREQS, _LONG, _SHORT = "rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"
ROPE_TENSORS = (_FREQS, _LONG, _SHORT)  # they say how positions turn, and become part of the config


def as_written(value: float) -> float:
    """The number that a float32 was rounded from, as people write it."""
    return float(f"{value:.6g}")


def rope_theta(file: GgufFile, arch: str, default: float = 10_000.0) -> float:
    theta = as_written(file.optional(f"{arch}.rope.freq_base", float) or default)
    if theta <= 0:
        raise file.error(f"{arch}.rope.freq_base", f"must be above 0, got {theta}")
    return theta


def rope_scaling(file: GgufFile, arch: str) -> HfConfig | None:
    if _FREQS in file.tensors:
        return _llama3_scaling(file, arch)
    if _LONG in file.tensors or _SHORT in file.tensors:
        return _longrope(file, arch)
    kind = file.optional(f"{arch}.rope.scaling.type", str)
    if kind in (None, "none", "default"):
        linear = file.optional(f"{arch}.rope.scale_linear", float)  # of old files
        return None if linear in (None, 1.0) else {"rope_type": "linear", "factor": as_written(linear)}
    scaling: HfConfig = {"rope_type": kind}
    if (factor := file.optional(f"{arch}.rope.scaling.factor", float)) is not None:
        scaling["factor"] = as_written(factor)
    if (original := file.optional(f"{arch}.rope.scaling.original_context_length", int)) is not None:
        scaling["original_max_position_embeddings"] = original
    for ours, theirs in (("beta_fast", "yarn_beta_fast"), ("beta_slow", "yarn_beta_slow")):
        if (beta := file.optional(f"{arch}.rope.scaling.{theirs}", float)) is not None:
            scaling[ours] = as_written(beta)
    return scaling


def _factors(file: GgufFile, name: str) -> list[float]:
    """The numbers of a small F32 tensor."""
    tensor = file.tensors.get(name)
    if tensor is None or tensor.type.name != "F32" or len(tensor.shape) != 1 or tensor.shape[0] > 2**16:
        raise file.error(name, "must be a vector in F32")
    try:
        with tensor.path.open("rb") as data:
            data.seek(tensor.offset)
            values = struct.unpack(f"<{tensor.shape[0]}f", data.read(tensor.num_bytes))
    except (OSError, struct.error) as error:
        raise file.error(name, f"can't be read: {error}") from error
    if not all(math.isfinite(value) and value > 0 for value in values):
        raise file.error(name, "has numbers that are not above 0")
    return [as_written(value) for value in values]


def _llama3_scaling(file: GgufFile, arch: str) -> HfConfig:
    factors = _factors(file, _FREQS)
    theta, factor = rope_theta(file, arch), max(factors)
    low, high, original = _LLAMA3.values()
    for i, found in enumerate(factors):
        wavelength = 2 * math.pi * theta ** (i / len(factors))
        smooth = min(1.0, max(0.0, (original / wavelength - low) / (high - low)))
        if not math.isclose(found, 1 / ((1 - smooth) / factor + smooth), rel_tol=1e-3):
            raise file.error(_FREQS, "is not the scaling of Llama 3, the only one that is supported")
    return {"rope_type": "llama3", "factor": factor, **_LLAMA3}


def _longrope(file: GgufFile, arch: str) -> HfConfig:
    """Phi-3's: https://arxiv.org/abs/2402.13753."""
    original = file.get(f"{arch}.rope.scaling.original_context_length", int)
    scaling: HfConfig = {
        "rope_type": "longrope",
        "long_factor": _factors(file, _LONG),
        "short_factor": _factors(file, _SHORT),
        "original_max_position_embeddings": original,
        "factor": file.get(f"{arch}.context_length", int) / max(original, 1),
    }
    if (factor := file.optional(f"{arch}.rope.scaling.attn_factor", float)) is not None:
        scaling["attention_factor"] = as_written(factor)
    return scaling
