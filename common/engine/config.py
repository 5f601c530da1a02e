"""Settings of an engine."""

from dataclasses import dataclass

from common.model.open import ModelSettings
from common.settings import POSITIVE, Bytes, setting

PREFILL_TOKENS = 512  # in a step of a prefill worker
DECODE_TOKENS = 256  # fewer: a prompt computed on a decode worker delays every running sequence's next token


@dataclass(frozen=True, slots=True)
class EngineConfig(ModelSettings):
    """One engine: a model, its KV pool and how much a step may take on."""

    dtype: str = setting("auto", "of weights and KV", choices=("auto", "float32", "bfloat16", "float16"))
    max_model_len: int | None = setting(
        None, "longest prompt plus output, tokens (default: the model's own)", within=POSITIVE
    )
    max_num_seqs: int = setting(64, "sequences running at once", within=POSITIVE)
    max_num_batched_tokens: int | None = setting(
        None,
        f"tokens a step may compute (default: {PREFILL_TOKENS}, on decode workers {DECODE_TOKENS})",
        within=POSITIVE,
    )
    enable_prefix_caching: bool = setting(True, "keep full blocks for later requests with the same prefix")
    kv_cache_memory: Bytes | None = setting(
        None, "size of the KV pool, such as 512Mi (default: this worker's part of the memory)", within=POSITIVE
    )
    attention_backend: str = setting(
        "auto",
        "attention's code: compiled here for this CPU, or torch's operations",
        choices=("auto", "native", "torch"),
    )
    gpu_memory_utilization: float = setting(
        0.5, "share of the memory that all workers of this host may use together", within=(0.01, 1.0)
    )
    workers_per_host: int = setting(1, "workers on this host, which share its memory", within=POSITIVE)
    threads: int | None = setting(
        None, "CPU threads of the step loop (default: the cores that affinity and the CPU quota leave)", within=POSITIVE
    )
