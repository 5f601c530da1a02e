"""What each architecture's config.json means where it is not as Llama's: one table.

Defaults are those of transformers' config classes: configs are written without what equals them. A feature that
changes the maths is read by the families that have it and refused by name in all others.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from common.model.json_file import JsonFile, short
from common.model.rope import Rope, parse_rope, rope_parameters


def _never(file: JsonFile, layer: int) -> bool:
    return False


def _always(file: JsonFile, layer: int) -> bool:
    return True


def _from_max_window_layers(file: JsonFile, layer: int) -> bool:
    return layer >= file.get("max_window_layers", int)


def _where_rope_is_not(file: JsonFile, layer: int) -> bool:
    return not _has_rope(file, layer)


def _but_every(default: int) -> Callable[[JsonFile, int], bool]:
    return lambda file, layer: (layer + 1) % file.positive("sliding_window_pattern", default) != 0


def _has_rope(file: JsonFile, layer: int) -> bool:
    """SmolLM3 leaves positions out in every fourth layer (NoPE)."""
    told = file.content.get("no_rope_layers")
    if told is None:
        return (layer + 1) % file.positive("no_rope_layer_interval", 4) != 0
    if not isinstance(told, list) or len(told) <= layer or told[layer] not in (0, 1):
        raise file.error("no_rope_layers", f"must be a list with 0 or 1 for each layer, got {short(told)}")
    return bool(told[layer])


@dataclass(frozen=True, slots=True)
class Family:
    """An architecture, by its differences from Llama."""

    defaults: Mapping[str, Any] = field(default_factory=dict)  # of keys that config.json lacks
    reads: frozenset[str] = frozenset()  # keys of NEUTRAL that mean something here
    slides: Callable[[JsonFile, int], bool] = _never  # which layers have a window, if there is one
    free_layer_types: bool = False  # whether layer_types may say otherwise
    qkv_bias: bool = False  # whatever attention_bias says
    qk_norm: bool = False  # a norm of each head of Q and K
    sandwich_norms: bool = False  # a norm before and one behind both attention and MLP
    norm_offset: float = 0.0  # what is added to each norm's weight
    scaled_embedding: bool = False  # by sqrt(hidden_size)
    fused_weights: bool = False  # Q, K and V, and gate and up, are one tensor each in the files
    activation_key: str = "hidden_act"
    activations: Mapping[str, str] = field(default_factory=lambda: {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"})
    rope_by_layer_type: bool = False
    overflows_float16: bool = False  # activations go beyond 65504


_BIASES = frozenset({"attention_bias", "mlp_bias"})
_QWEN = {
    "num_key_value_heads": 32, "sliding_window": 4096, "max_window_layers": 28, "use_sliding_window": False,
}  # fmt: skip
_GEMMA = {"head_dim": 256, "tie_word_embeddings": True, "num_key_value_heads": 4, "sliding_window": 4096}
_GEMMA_READS = frozenset(
    {"attention_bias", "sliding_window", "query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping"}
)
_SCALARS = {"hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 256}

FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family(reads=_BIASES),
    "MistralForCausalLM": Family(
        defaults={"num_key_value_heads": 8, "sliding_window": 4096},
        reads=frozenset({"sliding_window"}),
        slides=_always,
    ),
    "Qwen2ForCausalLM": Family(
        defaults=_QWEN,
        reads=frozenset({"sliding_window", "use_sliding_window"}),
        slides=_from_max_window_layers,
        free_layer_types=True,
        qkv_bias=True,
    ),
    "Qwen3ForCausalLM": Family(
        defaults=_QWEN | {"head_dim": 128},
        reads=frozenset({"attention_bias", "sliding_window", "use_sliding_window"}),
        slides=_from_max_window_layers,
        free_layer_types=True,
        qk_norm=True,
    ),
    "SmolLM3ForCausalLM": Family(
        defaults={"num_key_value_heads": 4, "tie_word_embeddings": True, "rope_theta": 2_000_000.0},
        reads=_BIASES | {"sliding_window", "use_sliding_window", "no_rope_layers", "no_rope_layer_interval"},
        slides=_where_rope_is_not,
        free_layer_types=True,
    ),
    "Phi3ForCausalLM": Family(
        defaults={"original_max_position_embeddings": 4096},
        reads=frozenset({"sliding_window", "partial_rotary_factor"}),
        slides=_always,
        fused_weights=True,
    ),
    "GemmaForCausalLM": Family(
        defaults={"head_dim": 256, "tie_word_embeddings": True, "num_key_value_heads": 16, "hidden_act": "gelu"},
        reads=frozenset({"attention_bias"}),
        norm_offset=1.0,
        scaled_embedding=True,
        activations={"gelu": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "silu": "silu"},
    ),
    "Gemma2ForCausalLM": Family(
        defaults=_GEMMA | _SCALARS | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
        reads=_GEMMA_READS,
        slides=_but_every(2),
        free_layer_types=True,
        sandwich_norms=True,
        norm_offset=1.0,
        scaled_embedding=True,
        overflows_float16=True,
        activation_key="hidden_activation",
    ),
    "Gemma3ForCausalLM": Family(
        defaults=_GEMMA | _SCALARS | {"rope_theta": 1_000_000.0, "rope_local_base_freq": 10_000.0},
        reads=_GEMMA_READS | {"rope_local_base_freq", "sliding_window_pattern"},
        slides=_but_every(6),
        free_layer_types=True,
        qk_norm=True,
        sandwich_norms=True,
        norm_offset=1.0,
        scaled_embedding=True,
        overflows_float16=True,
        activation_key="hidden_activation",
        rope_by_layer_type=True,
    ),
}

# Keys that change the maths, and the values beside null with which they don't.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "sliding_window": (),
    "use_sliding_window": (False,),
    "sliding_window_pattern": (),
    "no_rope_layers": (),
    "no_rope_layer_interval": (),
    "partial_rotary_factor": (1,),
    "rope_local_base_freq": (),
    "rope_interleaved": (False,),
    "query_pre_attn_scalar": (),
    "attn_logit_softcapping": (),
    "final_logit_softcapping": (),
    "use_bidirectional_attention": (False,),
    "attention_multiplier": (),
    "embedding_multiplier": (1,),
    "residual_multiplier": (1,),
    "logits_scaling": (1,),
    "logit_scale": (1,),
    "attention_chunk_size": (),
    "attn_temperature_tuning": (False,),
    "clip_qkv": (),
    "use_qk_norm": (False,),
    "qk_layernorm": (False,),
    "use_mrope": (False,),
    "alibi": (False,),
    "lm_head_bias": (False,),
    "num_experts": (0,),
    "num_local_experts": (0,),
    "n_routed_experts": (0,),
    "quantization_config": (),
}


def check_features(file: JsonFile, family: Family, architecture: str) -> None:
    """Refuses what would be computed otherwise than the config asks."""
    for key, neutral in NEUTRAL.items():
        value = file.content.get(key)
        if key in family.reads or value is None or any(value == each for each in neutral):
            continue
        raise file.error(key, f"{short(value)} is not supported in a {architecture}")


def parse_windows(file: JsonFile, family: Family, num_layers: int) -> tuple[int | None, ...]:
    """Of each layer: how many tokens a query sees, itself included; None where it sees all."""
    window = None
    if "sliding_window" in family.reads and file.content.get("sliding_window") is not None:
        window = file.positive("sliding_window")
    if "use_sliding_window" in family.reads and not file.get("use_sliding_window", bool, False):
        window = None
    slides = [window is not None and family.slides(file, layer) for layer in range(num_layers)]
    types = file.content.get("layer_types")
    if types is not None:
        kinds = ("full_attention", "sliding_attention")
        if not isinstance(types, list) or len(types) != num_layers or any(kind not in kinds for kind in types):
            raise file.error("layer_types", f"must be a list of {num_layers} of {' and '.join(kinds)}")
        told = [kind == kinds[1] for kind in types]
        if any(told) and window is None:
            raise file.error("layer_types", "has sliding_attention, but there is no sliding_window")
        if told != slides and not family.free_layer_types:
            raise file.error("layer_types", "other than the same for all layers is not supported")
        slides = told
    return tuple(window if each else None for each in slides)


def parse_ropes(
    file: JsonFile, family: Family, head_dim: int, windows: tuple[int | None, ...]
) -> tuple[Rope | None, ...]:
    """Of each layer; None where positions play no part."""
    theta = file.number("rope_theta", 10_000.0, above=0)
    if family.rope_by_layer_type:
        full, local = _ropes_by_layer_type(file, head_dim, theta)
        return tuple(full if window is None else local for window in windows)
    partial = "partial_rotary_factor" in family.reads
    rope = parse_rope(file, rope_parameters(file), head_dim, theta=theta, partial=partial)
    if "no_rope_layers" in family.reads:
        return tuple(rope if _has_rope(file, layer) else None for layer in range(len(windows)))
    return (rope,) * len(windows)


def _ropes_by_layer_type(file: JsonFile, head_dim: int, theta: float) -> tuple[Rope, Rope]:
    """Of full and of sliding layers. transformers 4 scales the full ones and has another base for the others."""
    full, local = file.child("rope_scaling"), None
    parameters = file.child("rope_parameters")
    if parameters is not None:
        if full is not None:
            raise file.error("rope_scaling", "beside rope_parameters is not supported")
        full, local = parameters.child("full_attention"), parameters.child("sliding_attention")
        if parameters.content.keys() - {"full_attention", "sliding_attention"}:
            raise file.error("rope_parameters", "must have full_attention and sliding_attention, and nothing else")
    nothing = JsonFile(file.path, {})
    local_theta = file.number("rope_local_base_freq", above=0)
    return (
        parse_rope(file, full or nothing, head_dim, theta=theta, partial=False),
        parse_rope(file, local or nothing, head_dim, theta=local_theta, partial=False),
    )
