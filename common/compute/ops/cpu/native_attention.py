"""Attention in native code over the reference's other operations; the same promise: a row's bits are its own.

The kernel (attention.cpp) reads keys and values where they lie in the pool, without gathering or padding.
"""

import ctypes
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from common.compute.native_build import NativeUnavailable, build
from common.compute.ops.reference import reference_ops as reference
from common.compute.ops.reference.step_plan import RotaryPlan, prepare_rotary
from common.compute.ops.table import Ops, StepInput
from common.model.config import ModelConfig

SOURCE = Path(__file__).parent / "attention.cpp"
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
DIMS = (16, 32, 48, 64, 80, 96, 128, 256)
MOST_HEADS_A_GROUP = 48


class Step(ctypes.Structure):
    """As in attention.cpp."""

    _fields_ = (
        ("q", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("cache", ctypes.c_void_p),
        ("block_stride", ctypes.c_int64),
        ("key_offset", ctypes.c_int64),
        ("value_offset", ctypes.c_int64),
        ("dtype", ctypes.c_int32),
        ("heads", ctypes.c_int32),
        ("kv_heads", ctypes.c_int32),
        ("dim", ctypes.c_int32),
        ("num_chunks", ctypes.c_int32),
        ("row_starts", ctypes.c_void_p),
        ("contexts", ctypes.c_void_p),
        ("table_starts", ctypes.c_void_p),
        ("block_ids", ctypes.c_void_p),
        ("window", ctypes.c_int32),
        ("scale", ctypes.c_float),
        ("softcap", ctypes.c_float),
        ("threads", ctypes.c_int32),
    )


@dataclass(frozen=True, slots=True)
class NativePlan:
    """What the layers of a step share."""

    rotary: RotaryPlan
    row_starts: torch.Tensor  # [chunks + 1]
    contexts: torch.Tensor  # [chunks]
    table_starts: torch.Tensor  # [chunks + 1]
    block_ids: torch.Tensor  # of all tables


def prepare(step: StepInput, config: ModelConfig, dtype: torch.dtype) -> NativePlan:
    return NativePlan(
        rotary=prepare_rotary(step, config, dtype),
        row_starts=torch.tensor(step.row_starts),
        contexts=torch.tensor(step.contexts),
        table_starts=torch.tensor(step.table_starts),
        block_ids=step.block_ids.contiguous(),
    )


def rotary_and_store(qkv: torch.Tensor, cache: torch.Tensor, layer: int, plan: NativePlan) -> torch.Tensor:
    return reference.rotary_and_store(qkv, cache, layer, plan.rotary)


class Attention:
    """The kernel as an operation."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._kernel = library.paged_attention
        self._kernel.argtypes = (ctypes.POINTER(Step),)
        self._kernel.restype = ctypes.c_int

    def __call__(self, q: torch.Tensor, cache: torch.Tensor, layer: int, plan: NativePlan) -> torch.Tensor:
        q = q.contiguous()
        out = torch.empty_like(q)
        config = plan.rotary.config
        keys = layer * cache.stride(1)
        step = Step(
            q=q.data_ptr(),
            out=out.data_ptr(),
            cache=cache.data_ptr(),
            block_stride=cache.stride(0),
            key_offset=keys,
            value_offset=keys + cache.stride(2),
            dtype=DTYPES[q.dtype],
            heads=q.shape[1],
            kv_heads=cache.shape[3],
            dim=cache.shape[5],
            num_chunks=len(plan.contexts),
            row_starts=plan.row_starts.data_ptr(),
            contexts=plan.contexts.data_ptr(),
            table_starts=plan.table_starts.data_ptr(),
            block_ids=plan.block_ids.data_ptr(),
            window=config.layers[layer].window or 0,
            scale=config.attention_scale,
            softcap=config.attention_softcap or 0.0,
            threads=torch.get_num_threads(),
        )
        if self._kernel(ctypes.byref(step)):
            raise ValueError(f"no native attention for {tuple(q.shape)} of {q.dtype}")
        return out.view(len(q), -1)


def load_ops(config: ModelConfig) -> Ops:
    """The table with native attention. Raises NativeUnavailable."""
    if config.head_dim not in DIMS:
        raise NativeUnavailable(f"head_dim is {config.head_dim}, none of {DIMS}")
    if config.num_heads // config.num_kv_heads > MOST_HEADS_A_GROUP:
        raise NativeUnavailable(f"more than {MOST_HEADS_A_GROUP} query heads share a KV head")
    try:
        library = ctypes.CDLL(str(build(SOURCE, library=True)))
    except OSError as error:
        raise NativeUnavailable(str(error)) from error
    return replace(
        reference.OPS,
        name="native attention, torch for the rest",
        prepare=prepare,
        rotary_and_store=rotary_and_store,
        attention=Attention(library),
    )
