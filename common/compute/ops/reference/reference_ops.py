"""The reference operations in plain torch: the truth that every other backend is tested against.

A row's answer must not depend, bit for bit, on the rows beside it. Torch promises no such thing, so this holds to what
gives the same bits however many rows and threads there are (the tests check it on the machine at hand): matrix
products with rows as pad_rows makes them and columns in multiples of 16, torch.exp, and reductions along the last
dimension. Not among them are F.silu in float32, torch.exp2, and scaled_dot_product_attention.

Attention has one order for a decode step and for any part of a prompt. Keys are taken in chunks of KEY_CHUNK, counted
from position 0; the last is filled up and masked. Each chunk alone gives a query its largest score m,
l = sum(exp(score - m)) and o = sum(exp(score - m) * value). With M the largest m, the answer is
sum(exp(m - M) * o) / sum(exp(m - M) * l), added up in the order of the chunks (the split softmax of Flash-Decoding,
https://crfm.stanford.edu/2023/10/12/flashdecoding.html). A chunk that a query doesn't see adds exact zeros. Scores and
sums are float32; probabilities meet the values in the cache's dtype.
"""

import math
from collections.abc import Sequence
from itertools import accumulate

import torch
import torch.nn.functional as F

from common.block_hash import BLOCK_SIZE
from common.compute.linear_weight import DenseWeight, LinearWeight
from common.compute.ops.reference.step_plan import (
    KEY_CHUNK,
    ROWS,
    DecodePlan,
    PrefillPlan,
    RotaryPlan,
    StepPlan,
    prepare,
)
from common.compute.ops.table import Ops, UnknownWeight
from common.model.config import ModelConfig

SMALL_PRODUCT = 16**3  # rows * inner * columns
LOWEST = torch.finfo(torch.float32).min


def pad_rows(x: torch.Tensor, columns: int) -> torch.Tensor:
    """x [..., rows, inner] with zero rows, as many as its product with [inner, columns] needs for its usual bits."""
    rows, inner = x.shape[-2:]
    if x.dtype == torch.float32:
        wanted = -(-rows // ROWS) * ROWS
    else:  # torch has another kernel for a single row, and for products below a certain size
        wanted = max(rows, 2, SMALL_PRODUCT // (inner * columns) + 1)
    return F.pad(x, (0, 0, 0, wanted - rows)) if rows < wanted else x


def dense(weight: LinearWeight) -> torch.Tensor:
    """The matrix of the one kind that is multiplied with here. Raises UnknownWeight."""
    if isinstance(weight, DenseWeight):
        return weight.tensor
    raise UnknownWeight(f"no product with a {weight.kind} weight")


def embedding(token_ids: torch.Tensor, weight: LinearWeight) -> torch.Tensor:
    return F.embedding(token_ids, dense(weight))


def linear(
    x: torch.Tensor, weight: LinearWeight, bias: torch.Tensor | None = None, adapters: torch.Tensor | None = None
) -> torch.Tensor:
    if adapters is not None:
        raise UnknownWeight("no product with adapters")
    matrix = dense(weight)
    product = F.linear(pad_rows(x, len(matrix)), matrix)[: x.shape[0]]
    return product if bias is None else product + bias


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return F.rms_norm(x.to(weight.dtype), (x.shape[-1],), weight, eps).to(x.dtype)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    total = x + residual
    return rms_norm(total, weight, eps), total


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, -1)
    if gate.dtype == torch.float32:
        # F.silu has another exp for what is left over after whole vector registers: its bits depend on the place.
        return gate / (1 + torch.exp(-gate)) * up
    return F.silu(gate) * up  # rounding hides that difference, for each of the 65,536 numbers


def gelu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """x * (1 + tanh(u)) / 2 with u = sqrt(2 / pi) * (x + 0.044715 * x^3), which is x / (1 + exp(-2 * u))."""
    gate, up = gate_up.chunk(2, -1)
    x = gate.float()
    return (x / (1 + torch.exp(-2 * math.sqrt(2 / math.pi) * (x + 0.044715 * (x * x * x))))).to(gate.dtype) * up


def soft_cap(x: torch.Tensor, cap: float) -> torch.Tensor:
    return cap - 2 * cap / (torch.exp(x * (2 / cap)) + 1)  # torch.tanh's bits depend on the place


def logits(x: torch.Tensor, head: LinearWeight) -> torch.Tensor:
    return linear(x, head).float()


def _pool_rows(cache: torch.Tensor, layer: int, part: int, width: int) -> torch.Tensor:
    """The pool as rows of `width` elements, from where a layer's keys (part 0) or values (1) of block 0 start."""
    kv_heads, head_dim = cache.shape[3], cache.shape[5]
    first = (2 * layer + part) * kv_heads * BLOCK_SIZE * head_dim // width
    rows: torch.Tensor = cache.view(-1, width)[first:]
    return rows


def rotary_and_store(qkv: torch.Tensor, cache: torch.Tensor, layer: int, plan: RotaryPlan) -> torch.Tensor:
    """Rotates q and k (halves, as Hugging Face's Llama), and writes k and v into their blocks."""
    heads, kv_heads, head_dim = plan.config.num_heads, plan.config.num_kv_heads, plan.config.head_dim
    by_head = qkv.view(-1, heads + 2 * kv_heads, head_dim)
    qk, v = by_head[:, : heads + kv_heads], by_head[:, heads + kv_heads :]
    rotated, rotary = qk, plan.rotary[layer]
    if rotary is not None:
        low, high, rest = qk.tensor_split((rotary.half, 2 * rotary.half), -1)
        rotated = qk * rotary.cos + torch.cat([high, low, rest], -1) * rotary.sin
    for part, new in enumerate((rotated[:, heads:], v)):
        _pool_rows(cache, layer, part, head_dim).index_copy_(0, plan.token_rows, new.reshape(-1, head_dim))
    return rotated[:, :heads]


def attention(q: torch.Tensor, cache: torch.Tensor, layer: int, plan: StepPlan) -> torch.Tensor:
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    attention_plan = plan.attention[layer]
    for prefill in attention_plan.prefills:
        _attend_prompt(q, cache, layer, prefill, plan.config, out)
    if attention_plan.decode is not None:
        _attend_decode(q, cache, layer, attention_plan.decode, plan.config, out)
    return out.view(len(q), -1)


def _gather(cache: torch.Tensor, layer: int, part: int, blocks: torch.Tensor) -> torch.Tensor:
    """Keys (part 0) or values (1) of key chunks: [chunks * kv heads, KEY_CHUNK, head dim]."""
    head_dim = cache.shape[5]
    return _pool_rows(cache, layer, part, BLOCK_SIZE * head_dim).index_select(0, blocks).view(-1, KEY_CHUNK, head_dim)


def _attend_prompt(
    q: torch.Tensor, cache: torch.Tensor, layer: int, plan: PrefillPlan, config: ModelConfig, out: torch.Tensor
) -> None:
    kv_heads, head_dim = cache.shape[3], cache.shape[5]
    keys = _gather(cache, layer, 0, plan.blocks).float().view(-1, kv_heads, KEY_CHUNK, head_dim)
    values = _gather(cache, layer, 1, plan.blocks).view(-1, kv_heads, KEY_CHUNK, head_dim)
    for tile in plan.tiles:
        rows = slice(tile.first_row, tile.last_row)
        chunks = slice(tile.first_chunk, tile.first_chunk + len(tile.masks))
        _attend_tile(q[rows], keys[chunks], values[chunks], tile.masks, config, out[rows])


def _attend_tile(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    masks: Sequence[torch.Tensor | None],
    config: ModelConfig,
    out: torch.Tensor,
) -> None:
    """q and out [tokens, heads, head dim]; a kv head's queries of all tokens are the rows of one product."""
    (tokens, heads, head_dim), kv_heads, chunks = q.shape, keys.shape[1], len(masks)
    heads_each = heads // kv_heads
    shape = (kv_heads, tokens, heads_each)
    queries = q.view(tokens, kv_heads, heads_each, head_dim).transpose(0, 1).reshape(kv_heads, -1, head_dim)
    queries = pad_rows(queries.float() * config.attention_scale, KEY_CHUNK)
    top = queries.new_empty(chunks, kv_heads, tokens * heads_each, 1)
    sums = queries.new_empty(chunks, kv_heads, tokens * heads_each, head_dim + 1)
    for chunk, mask in enumerate(masks):
        cap = config.attention_softcap
        _attend_chunk(queries, keys[chunk], values[chunk], mask, cap, shape, top[chunk], sums[chunk])
    joined = _join(top, sums, (1,) * chunks, torch.zeros(chunks, dtype=torch.int64))
    out.view(tokens, kv_heads, heads_each, head_dim).copy_(joined.view(*shape, head_dim).transpose(0, 1))


def _attend_decode(
    q: torch.Tensor, cache: torch.Tensor, layer: int, plan: DecodePlan, config: ModelConfig, out: torch.Tensor
) -> None:
    kv_heads, heads_each, head_dim = plan.queries.shape[1], plan.top.shape[2], q.shape[2]
    pair_rows = plan.rows.index_select(0, plan.owners)
    for first in range(0, len(plan.owners), plan.group):
        pairs = slice(first, first + plan.group)
        asked = q.index_select(0, pair_rows[pairs]).view(-1, kv_heads, heads_each, head_dim)
        queries = plan.queries[: len(asked)]
        queries[:, :, :heads_each].copy_(asked).mul_(config.attention_scale)  # float32 before it is scaled
        blocks = plan.blocks[pairs].view(-1)
        keys, values = _gather(cache, layer, 0, blocks).float(), _gather(cache, layer, 1, blocks)
        top, sums = plan.top[pairs].flatten(0, 1), plan.sums[pairs].flatten(0, 1)
        shape = (len(asked), kv_heads, heads_each)
        cap = config.attention_softcap
        _attend_chunk(queries.flatten(0, 1), keys, values, plan.masks[pairs], cap, shape, top, sums)
    joined = _join(plan.top, plan.sums, plan.counts, plan.owners)
    out.index_copy_(0, plan.rows, joined.flatten(1, 2).to(out.dtype))


def _attend_chunk(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    cap: float | None,
    shape: tuple[int, int, int],
    top: torch.Tensor,
    sums: torch.Tensor,
) -> None:
    """One key chunk each of b pairs of a sequence and a kv head; writes m to top, o and l to sums.

    Scaled queries [b, rows and padding, dim], keys and values [b, KEY_CHUNK, dim], top [b, rows, 1],
    sums [b, rows, dim + 1]; shape is what b * rows are made of, as the mask wants it.
    """
    rows, head_dim = top.shape[1], values.shape[2]
    scores = torch.bmm(queries, keys.transpose(1, 2))[:, :rows]
    if cap is not None:
        scores = soft_cap(scores, cap)
    if mask is not None:
        scores.view(*shape, KEY_CHUNK).add_(mask)
    torch.amax(scores, -1, keepdim=True, out=top)
    top.clamp_(min=LOWEST)  # a query may see none of these keys
    weights = (scores - top).exp_()
    torch.sum(weights, -1, keepdim=True, out=sums[..., head_dim:])
    sums[..., :head_dim].copy_(torch.bmm(pad_rows(weights.to(values.dtype), head_dim), values)[:, :rows])


def _join(top: torch.Tensor, sums: torch.Tensor, counts: Sequence[int], owners: torch.Tensor) -> torch.Tensor:
    """Joins key chunks in their order, into and as [counts[0], ..., dim]; writes over sums.

    Of top [pairs, ..., 1] and sums [pairs, ..., dim + 1], the first counts[0] pairs are key chunk 0's, then come
    counts[1] of key chunk 1's, and so on. In each key chunk the owners are 0, 1, 2, ...
    """
    total = sums[: counts[0]]
    if len(counts) > 1:  # with one, all factors are 1
        ends = list(accumulate(counts))
        best = top[: counts[0]].clone()
        for end, count in zip(ends[1:], counts[1:], strict=True):
            torch.maximum(best[:count], top[end - count : end], out=best[:count])
        sums *= (top - best.index_select(0, owners)).exp_()
        for end, count in zip(ends[1:], counts[1:], strict=True):
            total[:count] += sums[end - count : end]
    return total[..., :-1] / total[..., -1:]


OPS = Ops(
    name="reference (torch)",
    embedding=embedding,
    linear=linear,
    rms_norm=rms_norm,
    add_rms_norm=add_rms_norm,
    silu_and_mul=silu_and_mul,
    gelu_and_mul=gelu_and_mul,
    soft_cap=soft_cap,
    logits=logits,
    prepare=prepare,
    rotary_and_store=rotary_and_store,
    attention=attention,
)
