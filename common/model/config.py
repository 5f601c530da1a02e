"""Reading a model directory's config.json and generation_config.json."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from common.errors import ConfigError
from common.layout import DTYPE_BYTES, KVLayout
from common.model.families import FAMILIES, Family, check_features, parse_ropes, parse_windows
from common.model.json_file import JsonFile, short
from common.model.rope import Linear, Rope

__all__ = [
    "GenerationDefaults",
    "JsonFile",
    "LayerConfig",
    "ModelConfig",
    "model_name",
    "parse_config",
    "parse_generation",
]


MAX_LAYERS = 10_000  # a sane bound, since each of them has an entry here


@dataclass(frozen=True, slots=True)
class LayerConfig:
    """In what one layer may differ from another."""

    rope: Rope | None  # None: positions play no part
    window: int | None = None  # how many tokens a query sees, itself included; None: all before it


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The shape of a decoder, whatever its config.json calls it. Defaults are Llama's."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int  # tokens: the context where nobody asks for another
    tie_word_embeddings: bool
    dtype: str  # the checkpoint's own: a key of DTYPE_BYTES
    layers: tuple[LayerConfig, ...]
    attention_scale: float  # of the products of queries and keys
    activation: str = "silu"  # or "gelu_tanh"
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False  # a norm of each head of Q and K
    sandwich_norms: bool = False  # a norm behind attention and MLP, too
    norm_offset: float = 0.0  # what is added to each norm's weight
    fused_weights: bool = False  # Q, K and V, and gate and up, are one tensor each in the files
    embedding_scale: float = 1.0
    attention_softcap: float | None = None  # the scores' bound, softly
    logit_softcap: float | None = None
    overflows_float16: bool = False  # activations go beyond 65504

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def longest_context(self) -> int:
        """Tokens, as far as the positions of all layers reach."""
        reach = [layer.rope.max_positions for layer in self.layers if layer.rope is not None]
        return min((length or self.max_position_embeddings for length in reach), default=self.max_position_embeddings)

    def resolve_dtype(self, wanted: str) -> str:
        """The dtype of weights and KV for the setting `wanted`, which may be "auto". Raises ConfigError."""
        if self.overflows_float16 and "float16" in (wanted, self.dtype if wanted == "auto" else ""):
            if wanted == "float16":
                problem = f"a {self.architecture} overflows in float16; use bfloat16 or float32"
                raise ConfigError(problem, field="dtype")
            return "bfloat16"
        return self.dtype if wanted == "auto" else wanted

    def context_length(self, wanted: int | None) -> int:
        """The longest prompt plus output for the setting max_model_len. Raises ConfigError beyond the model's own."""
        if wanted is not None and wanted > self.longest_context:
            raise ConfigError(
                f"max_model_len is {wanted}, the model was made for {self.longest_context}",
                field="max_model_len",
            )
        return wanted or self.max_position_embeddings

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


def _dtype(file: JsonFile) -> str:
    key = "dtype" if file.content.get("dtype") is not None else "torch_dtype"
    dtype = file.get(key, str, "float32").removeprefix("torch.")
    dtype = "float32" if dtype == "auto" else dtype  # and no weights here to tell
    if dtype not in DTYPE_BYTES:
        raise file.error(key, f"{dtype!r} is not supported (only {', '.join(DTYPE_BYTES)})")
    return dtype


def parse_config(file: JsonFile) -> ModelConfig:
    """Checks the content of a config.json. Raises ModelError that names the key at fault."""
    names = file.content.get("architectures")
    if not (isinstance(names, list) and len(names) == 1 and isinstance(names[0], str)):
        raise file.error("architectures", f"must be a list of one name, got {short(names)}")
    if names[0] not in FAMILIES:
        raise file.error("architectures", f"{names[0]!r} is not supported (only {', '.join(FAMILIES)})")
    family = FAMILIES[names[0]]
    return _parse(JsonFile(file.path, {**family.defaults, **file.content}, file.prefix), family, names[0])


def _parse(file: JsonFile, family: Family, architecture: str) -> ModelConfig:
    check_features(file, family, architecture)
    hidden_size, num_layers = file.positive("hidden_size"), file.positive("num_hidden_layers")
    if num_layers > MAX_LAYERS:
        raise file.error("num_hidden_layers", f"must be {MAX_LAYERS} at most, got {num_layers}")
    num_heads, num_kv_heads, head_dim = _heads(file, hidden_size)
    windows = parse_windows(file, family, num_layers)
    ropes = parse_ropes(file, family, head_dim, windows)
    attention_bias = file.get("attention_bias", bool, False)
    return ModelConfig(
        architecture=architecture,
        vocab_size=file.positive("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=file.positive("intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=file.number("rms_norm_eps", above=0),
        max_position_embeddings=_context(file, ropes),
        tie_word_embeddings=file.get("tie_word_embeddings", bool, False),
        dtype=_dtype(file),
        layers=tuple(LayerConfig(rope, window) for rope, window in zip(ropes, windows, strict=True)),
        attention_scale=file.number("query_pre_attn_scalar", float(head_dim), above=0) ** -0.5,
        activation=_activation(file, family),
        qkv_bias=family.qkv_bias or attention_bias,
        out_bias=attention_bias,
        mlp_bias=file.get("mlp_bias", bool, False),
        qk_norm=family.qk_norm,
        sandwich_norms=family.sandwich_norms,
        norm_offset=family.norm_offset,
        fused_weights=family.fused_weights,
        embedding_scale=hidden_size**0.5 if family.scaled_embedding else 1.0,
        attention_softcap=_softcap(file, "attn_logit_softcapping"),
        logit_softcap=_softcap(file, "final_logit_softcapping"),
        overflows_float16=family.overflows_float16,
    )


def _context(file: JsonFile, ropes: Iterable[Rope | None]) -> int:
    """As far as positions reach, except that many a config with `linear` counts its factor in already."""
    told = file.positive("max_position_embeddings")
    lengths = [rope.max_positions for rope in ropes if rope is not None and not isinstance(rope.scaling, Linear)]
    return min((length or told for length in lengths), default=told)


def _heads(file: JsonFile, hidden_size: int) -> tuple[int, int, int]:
    """Heads, KV heads, and a head's size."""
    num_heads = file.positive("num_attention_heads")
    num_kv_heads = file.positive("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise file.error("num_key_value_heads", f"{num_kv_heads} does not divide num_attention_heads {num_heads}")
    if file.content.get("head_dim") is None and hidden_size % num_heads:
        raise file.error("hidden_size", f"{hidden_size} is no multiple of num_attention_heads {num_heads}")
    head_dim = file.positive("head_dim", hidden_size // num_heads)
    if head_dim % 2:
        raise file.error("head_dim", f"must be even for rotary embeddings, got {head_dim}")
    return num_heads, num_kv_heads, head_dim


def _activation(file: JsonFile, family: Family) -> str:
    key = family.activation_key
    activation = file.get(key, str, "silu")
    if activation not in family.activations:
        raise file.error(key, f"{activation!r} is not supported (only {', '.join(family.activations)})")
    return family.activations[activation]


def _softcap(file: JsonFile, key: str) -> float | None:
    return None if file.content.get(key) is None else file.number(key, above=0)


def _eos_token_ids(file: JsonFile) -> tuple[int, ...] | None:
    value = file.content.get("eos_token_id")
    if value is None:
        return None
    ids = value if isinstance(value, list) else [value]
    if not all(type(token_id) is int and 0 <= token_id < 2**31 for token_id in ids):
        raise file.error("eos_token_id", f"must be a token id or a list of them, got {short(value)}")
    return tuple(dict.fromkeys(ids))


def parse_generation(config: JsonFile, generation: JsonFile | None) -> GenerationDefaults:
    """Checks the content of a generation_config.json; EOS falls back to the config's. Raises ModelError."""
    file = generation or JsonFile(config.path, {})
    eos = _eos_token_ids(file)
    if eos is None:
        eos = _eos_token_ids(config) or ()

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
