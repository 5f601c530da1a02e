"""The reference operations compute what the formulas say, and give a row the same bits in any company."""

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate

import pytest
import torch

from common.block_hash import BLOCK_SIZE
from common.compute.linear_weight import DenseWeight
from common.compute.ops.choose import StepInput, choose_ops
from common.compute.ops.reference.reference_ops import OPS, pad_rows
from common.compute.ops.reference.step_plan import KEY_CHUNK, QUERY_TILE, prepare
from common.compute.ops.table import UnknownWeight
from common.model.config import LayerConfig, ModelConfig
from common.model.rope import Rope
from tests.support.model_tools import threads

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
BLOCKS_EACH = 40
ROPE = Rope(1e4, 32)


def make_config(
    num_heads: int = 6,
    num_kv_heads: int = 2,
    head_dim: int = 32,
    *,
    layers: tuple[LayerConfig, ...] = (LayerConfig(ROPE),) * 2,
    softcap: float | None = None,
) -> ModelConfig:
    return ModelConfig(
        "LlamaForCausalLM", 64, num_heads * head_dim, 64, num_heads, num_kv_heads, head_dim, 1e-5, 2048, True,
        "float32", layers, head_dim**-0.5, attention_softcap=softcap,
    )  # fmt: skip


def make_step(*chunks: tuple[int, int]) -> StepInput:
    """Of (start, length) each; chunk i's blocks are 40 * i, 40 * i + 1, ..."""
    positions = [start + i for start, length in chunks for i in range(length)]
    blocks = [BLOCKS_EACH * i + (start + j) // BLOCK_SIZE for i, (start, n) in enumerate(chunks) for j in range(n)]
    starts = [0]
    for _, length in chunks:
        starts.append(starts[-1] + length)
    contexts = tuple(start + length for start, length in chunks)
    tables = [[BLOCKS_EACH * i + j for j in range(-(-context // BLOCK_SIZE))] for i, context in enumerate(contexts)]
    return StepInput(
        torch.zeros(len(positions), dtype=torch.int64),
        torch.tensor(positions),
        torch.tensor(blocks),
        tuple(starts),
        contexts,
        torch.tensor([block for table in tables for block in table]),
        tuple(accumulate(map(len, tables), initial=0)),
        torch.tensor([start - 1 for start in starts[1:]]),
    )


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """Heavy tails: sums then depend on their order as much as they may."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) * torch.randn(shape, generator=generator).exp()).to(dtype)


def make_cache(config: ModelConfig, dtype: torch.dtype, num_blocks: int) -> torch.Tensor:
    return torch.zeros(num_blocks, *config.kv_layout("float32").shape, dtype=dtype)


def attention_by_formula(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, softcap: float | None = None
) -> torch.Tensor:
    """One query [heads, dim] over keys and values [tokens, kv heads, dim], in float64."""
    group = q.shape[0] // keys.shape[1]
    keys, values = (each.double().repeat_interleave(group, 1) for each in (keys, values))
    scores = torch.einsum("hd,thd->ht", q.double(), keys) / math.sqrt(q.shape[1])
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    return torch.einsum("ht,thd->hd", scores.softmax(-1), values)


CONTEXTS = [1, BLOCK_SIZE - 1, BLOCK_SIZE, BLOCK_SIZE + 1, KEY_CHUNK - 1, KEY_CHUNK, KEY_CHUNK + 1, 3 * KEY_CHUNK + 7]


CHUNKS = [
    *[[(context - 1, 1)] for context in CONTEXTS],  # each alone
    [(context - 1, 1) for context in CONTEXTS],  # together
    [(0, 2)],
    [(0, QUERY_TILE + 3)],
    [(KEY_CHUNK - 5, QUERY_TILE + 9)],
    [(7, 1), (30, 5), (400, 1), (0, 17)],
]


@pytest.mark.parametrize("heads", [(6, 2), (4, 4), (34, 2), (3, 1)])
@pytest.mark.parametrize("chunks", CHUNKS, ids=str)
def test_attention_is_softmax_over_all_keys_so_far(chunks: list[tuple[int, int]], heads: tuple[int, int]):
    check_attention(chunks, make_config(*heads))


WINDOWS = [1, 2, BLOCK_SIZE, KEY_CHUNK - 1, KEY_CHUNK, KEY_CHUNK + 1, 2 * KEY_CHUNK + 3, 1000]


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("chunks", CHUNKS, ids=str)
def test_a_window_hides_what_is_before_it(chunks: list[tuple[int, int]], window: int):
    check_attention(chunks, make_config(layers=(LayerConfig(ROPE), LayerConfig(ROPE, window))))


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("chunks", CHUNKS, ids=str)
def test_scores_are_capped_softly(chunks: list[tuple[int, int]], window: int | None):
    check_attention(chunks, make_config(layers=(LayerConfig(ROPE), LayerConfig(ROPE, window)), softcap=1.5))


def test_key_chunks_before_every_window_are_not_looked_at():
    config = make_config(layers=(LayerConfig(ROPE, KEY_CHUNK),))
    plan = prepare(make_step((5 * KEY_CHUNK + 1, 3), (5 * KEY_CHUNK + 1, 1)), config, torch.float32).attention[0]
    assert [len(tile.masks) for tile in plan.prefills[0].tiles] == [2]
    assert len(plan.prefills[0].blocks) == 2 * config.num_kv_heads * KEY_CHUNK // BLOCK_SIZE
    assert plan.decode.counts == (1, 1)


def check_attention(chunks: list[tuple[int, int]], config: ModelConfig) -> None:
    """Of layer 1, against the formula."""
    window = config.layers[1].window or 10**6
    cache = make_cache(config, torch.float32, BLOCKS_EACH * len(chunks)).fill_(torch.nan)
    step, layer = make_step(*chunks), 1
    told = []
    for i, (start, length) in enumerate(chunks):
        keys, values = (random(start + length, config.num_kv_heads, config.head_dim, seed=2 * i + j) for j in range(2))
        told.append((keys, values))
        for position in range(start + length):
            block, offset = BLOCKS_EACH * i + position // BLOCK_SIZE, position % BLOCK_SIZE
            if offset == 0:
                cache[block] = 0  # what a runner does with a block that is begun
            cache[block, layer, 0, :, offset] = keys[position]
            cache[block, layer, 1, :, offset] = values[position]
    q = random(step.row_starts[-1], config.num_heads, config.head_dim, seed=99)
    ours = OPS.attention(q, cache, layer, prepare(step, config, torch.float32)).view(q.shape)
    for i, (start, length) in enumerate(chunks):
        keys, values = told[i]
        for j in range(length):
            row, seen = step.row_starts[i] + j, start + j + 1
            first = max(0, seen - window)
            cap = config.attention_softcap
            expected = attention_by_formula(q[row], keys[first:seen], values[first:seen], cap)
            torch.testing.assert_close(ours[row].double(), expected, atol=1e-5, rtol=1e-4)


def test_scores_far_apart_and_equal_are_no_trouble():
    """A key chunk whose best score is far below another's, and one where all are the same."""
    config = make_config(1, 1, 32)
    cache = make_cache(config, torch.float32, BLOCKS_EACH)
    keys = torch.zeros(300, 1, 32)
    keys[:KEY_CHUNK] = 40.0
    values = random(300, 1, 32)
    cache[:19, 0, 0] = torch.cat([keys, keys[:4]]).view(19, BLOCK_SIZE, 1, 32).transpose(1, 2)
    cache[:19, 0, 1] = torch.cat([values, values[:4]]).view(19, BLOCK_SIZE, 1, 32).transpose(1, 2)
    for q in (torch.full((1, 1, 32), 40.0), torch.full((1, 1, 32), -40.0), torch.zeros(1, 1, 32)):
        ours = OPS.attention(q, cache, 0, prepare(make_step((299, 1)), config, torch.float32))
        torch.testing.assert_close(ours[0].double(), attention_by_formula(q[0], keys, values)[0], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rotary_and_store_rotates_halves_and_fills_blocks(dtype: torch.dtype):
    config, layer = make_config(), 1
    step = make_step((BLOCK_SIZE - 2, 4), (5, 1))
    cache = make_cache(config, dtype, 2 * BLOCKS_EACH)
    qkv = random(5, (6 + 4) * 32, dtype=dtype)
    q = OPS.rotary_and_store(qkv, cache, layer, prepare(step, config, dtype))
    by_head = qkv.view(5, 10, 32).double()
    expected = by_head.clone()
    for row, position in enumerate(step.positions.tolist()):
        for i in range(16):
            angle = position * 1e4 ** (-2 * i / 32)
            low, high = by_head[row, :8, i], by_head[row, :8, i + 16]
            expected[row, :8, i] = low * math.cos(angle) - high * math.sin(angle)
            expected[row, :8, i + 16] = high * math.cos(angle) + low * math.sin(angle)
    tolerance = {"atol": 1e-5, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 0.1, "rtol": 0.02}
    torch.testing.assert_close(q.double(), expected[:, :6], **tolerance)
    for row, position in enumerate(step.positions.tolist()):
        stored = cache[step.token_blocks[row], layer, :, :, position % BLOCK_SIZE]
        torch.testing.assert_close(stored[0].double(), expected[row, 6:8], **tolerance)
        assert torch.equal(stored[1], qkv.view(5, 10, 32)[row, 8:])
    assert int((cache != 0).sum()) == 5 * 2 * 2 * 32  # and nothing else


def test_a_part_of_each_head_is_rotated_and_a_layer_may_rotate_none():
    config = make_config(layers=(LayerConfig(Rope(1e4, 32)), LayerConfig(Rope(1e4, 8)), LayerConfig(None)))
    step, qkv = make_step((40, 3)), random(3, (6 + 4) * 32)
    plan = prepare(step, config, torch.float32)
    partly, none = (OPS.rotary_and_store(qkv, make_cache(config, torch.float32, 3), i, plan) for i in (1, 2))
    small = make_config(6, 2, 8, layers=(LayerConfig(Rope(1e4, 8)),))
    alone = qkv.view(3, 10, 32)[:, :, :8].reshape(3, -1)
    rotated = OPS.rotary_and_store(alone, make_cache(small, torch.float32, 3), 0, prepare(step, small, torch.float32))
    by_head = qkv.view(3, 10, 32)[:, :6]
    assert torch.equal(partly, torch.cat([rotated, by_head[..., 8:]], -1))
    assert torch.equal(none, by_head)


def test_an_attention_factor_scales_what_is_rotated():
    rope = Rope(1e4, 32, attention_factor=1.25)
    config = make_config(layers=(LayerConfig(ROPE), LayerConfig(rope)))
    qkv, step = random(3, (6 + 4) * 32), make_step((40, 3))
    plan, cache = prepare(step, config, torch.float32), make_cache(config, torch.float32, 3)
    plain, scaled = (OPS.rotary_and_store(qkv, cache, i, plan) for i in range(2))
    torch.testing.assert_close(scaled, plain * 1.25)


def test_rms_norm_and_residual_are_as_the_formula_says():
    x, residual, weight = random(5, 48), random(5, 48, seed=1), random(48, seed=2)
    total = (x + residual).double()
    expected = total / (total.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    normed, summed = OPS.add_rms_norm(x, residual, weight, 1e-5)
    torch.testing.assert_close(normed.double(), expected, atol=1e-5, rtol=1e-5)
    assert torch.equal(summed, x + residual)
    assert torch.equal(normed, OPS.rms_norm(summed, weight, 1e-5))


@pytest.mark.parametrize("dtype", DTYPES)
def test_silu_and_mul_is_as_the_formula_says(dtype: torch.dtype):
    gate_up = torch.cat(
        [random(7, 48, dtype=dtype), torch.full((7, 2), -1000.0, dtype=dtype), random(7, 50, dtype=dtype)], 1
    )
    gate, up = gate_up.double().chunk(2, -1)
    expected = gate * torch.sigmoid(gate) * up
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}[dtype]
    torch.testing.assert_close(OPS.silu_and_mul(gate_up).double(), expected, atol=tolerance, rtol=tolerance)


def test_a_float32_norm_of_half_precision_is_rounded_once():
    x, weight = random(5, 48, dtype=torch.bfloat16), 1 + random(48, seed=2) / 1000
    expected = OPS.rms_norm(x.float(), weight, 1e-5).bfloat16()
    assert torch.equal(OPS.rms_norm(x, weight, 1e-5), expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gelu_and_mul_is_as_torch_says(dtype: torch.dtype):
    far = torch.tensor([[-1e30, -1000.0, -7.0, -0.0, 1e-30, 7.0, 1000.0, 9000.0]]).to(dtype).expand(7, -1)
    gate, up = torch.cat([random(7, 48, dtype=dtype), far], 1), random(7, 56, dtype=dtype, seed=1)
    gate = gate.clamp(torch.finfo(dtype).min, torch.finfo(dtype).max)
    expected = torch.nn.functional.gelu(gate.double(), approximate="tanh") * up.double()
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}[dtype]
    ours = OPS.gelu_and_mul(torch.cat([gate, up], 1)).double()
    torch.testing.assert_close(ours, expected, atol=tolerance, rtol=tolerance)


def test_a_soft_cap_is_a_tanh():
    x = torch.cat([random(1000) * 30, torch.tensor([0.0, 1e-6, 1e30, -1e30, torch.inf, -torch.inf])])
    expected = 30 * torch.tanh(x.double() / 30)
    torch.testing.assert_close(OPS.soft_cap(x, 30.0).double(), expected, atol=1e-5, rtol=0)


ROWS = [1, 2, 3, 5, 15, 16, 17, 31, 33, 100]
OPERATIONS = {
    "linear to 16": (48, lambda x, w: OPS.linear(x, DenseWeight(w[:16, :48]))),
    "linear to 48": (48, lambda x, w: OPS.linear(x, DenseWeight(w[:48, :48]))),
    "linear to 960": (576, lambda x, w: OPS.linear(x, DenseWeight(w[:960]))),
    "linear from 1,536": (1536, lambda x, w: OPS.linear(x, DenseWeight(w.view(-1, 1536)[:192]))),
    "linear with a bias": (48, lambda x, w: OPS.linear(x, DenseWeight(w[:48, :48]), w[0, :48])),
    "logits": (64, lambda x, w: OPS.logits(x, DenseWeight(w[:1008, :64]))),
    "rms_norm": (100, lambda x, w: OPS.rms_norm(x, w[0, :100].to(x.dtype), 1e-5)),
    "rms_norm of heads": (100, lambda x, w: OPS.rms_norm(x.view(-1, 10), w[0, :10], 1e-5).view(len(x), -1)),
    "rms_norm in float32": (100, lambda x, w: OPS.rms_norm(x, w[0, :100].float(), 1e-5)),
    "silu_and_mul": (100, lambda x, w: OPS.silu_and_mul(x)),
    "gelu_and_mul": (102, lambda x, w: OPS.gelu_and_mul(x)),
    "soft_cap": (99, lambda x, w: OPS.soft_cap(x.float(), 3.0)),
}


@dataclass
class Strange:
    kind: str = "strange"


@pytest.mark.parametrize("operation", [OPS.linear, OPS.logits, lambda x, w: OPS.embedding(x.long(), w)])
def test_a_kind_of_weight_without_a_product_is_refused_by_name(operation: Callable[..., torch.Tensor]):
    with pytest.raises(UnknownWeight, match="strange"):
        operation(torch.zeros(1, 4), Strange())


def test_adapters_without_a_product_are_refused():
    with pytest.raises(UnknownWeight, match="adapters"):
        OPS.linear(torch.zeros(1, 4), DenseWeight(torch.zeros(2, 4)), None, torch.zeros(1, dtype=torch.int64))


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", OPERATIONS)
def test_a_row_has_the_same_bits_in_any_company(name: str, dtype: torch.dtype, num_threads: int):
    width, operation = OPERATIONS[name]
    x, weight = random(200, width, dtype=dtype), random(1008, 576, dtype=dtype, seed=1)
    expected = operation(x, weight)
    with threads(num_threads):
        for rows in ROWS:
            for first in range(0, len(x) - rows + 1, rows):
                assert torch.equal(operation(x[first : first + rows].clone(), weight), expected[first : first + rows])


@pytest.mark.parametrize("dtype", DTYPES)
def test_silu_has_one_answer_wherever_threads_divide_the_work(dtype: torch.dtype):
    x = random(2001, 102, dtype=dtype)
    expected = torch.cat([OPS.silu_and_mul(row[None]) for row in x])
    for num_threads in (1, 2, 3, 5, 7):
        with threads(num_threads):
            assert torch.equal(OPS.silu_and_mul(x), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_silu_has_one_answer_for_each_number_of_half_precision(dtype: torch.dtype):
    """All 65,536 of them: alone, and in whole vector registers."""
    gate = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype)
    gate = gate[gate.isfinite()]
    whole = OPS.silu_and_mul(torch.cat([gate, torch.ones_like(gate)])[None])[0]
    single = OPS.silu_and_mul(torch.stack([gate, torch.ones_like(gate)], 1))[:, 0]
    threes = torch.cat([OPS.silu_and_mul(torch.cat([part, torch.ones_like(part)])[None])[0] for part in gate.split(3)])
    assert torch.equal(whole, single)
    assert torch.equal(whole, threes)


@pytest.mark.parametrize(("rows", "padded"), [(0, 0), (1, 16), (15, 16), (16, 16), (17, 32)])
def test_float32_products_take_16_rows_at_a_time(rows: int, padded: int):
    assert pad_rows(torch.zeros(3, rows, 8), 64).shape == (3, padded, 8)


@pytest.mark.parametrize(
    ("rows", "inner", "columns", "padded"), [(1, 64, 64, 2), (2, 64, 64, 2), (1, 16, 16, 17), (5, 64, 64, 5)]
)
def test_half_products_are_never_small(rows: int, inner: int, columns: int, padded: int):
    assert pad_rows(torch.zeros(rows, inner, dtype=torch.bfloat16), columns).shape == (padded, inner)


def test_the_choice_is_one_log_line(caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.INFO, logger="kvrelay"):
        ops = choose_ops(make_config(), "torch")
    assert [(record.getMessage(), record.values["backend"]) for record in caplog.records] == [("operations", ops.name)]
