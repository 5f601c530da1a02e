"""A pool takes an equal part of what weights and steps leave, and says what would fit where that is too little."""

import pytest

from common.engine import memory
from common.engine.memory import MemoryPlan, available_memory, choose_num_blocks, memory_limit
from common.errors import ConfigError

GIB = 2**30
MIB = 2**20


def plan(
    *,
    limit: int = 16 * GIB,
    available: int = 16 * GIB,
    utilization: float = 0.5,
    workers: int = 1,
    weights: int = GIB,
    shared_weights: bool = True,
    working: int = 100 * MIB,
) -> MemoryPlan:
    return MemoryPlan(limit, available, utilization, workers, weights, shared_weights, working)


def test_the_pool_is_what_weights_steps_and_process_leave() -> None:
    assert plan().pool_bytes() == 8 * GIB - GIB - 100 * MIB - memory.PROCESS_BYTES


@pytest.mark.parametrize("workers", [1, 2, 5])
def test_all_workers_together_stay_within_their_share(workers: int) -> None:
    for shared in (True, False):
        one = plan(workers=workers, shared_weights=shared)
        weights = one.weights * (1 if shared else workers)
        taken = weights + workers * (one.pool_bytes() + one.working + memory.PROCESS_BYTES)
        assert 8 * GIB - workers < taken <= 8 * GIB


def test_what_others_use_is_not_there() -> None:
    assert plan(available=4 * GIB).pool_bytes() == plan().pool_bytes() - 4 * GIB


def test_too_little_memory_leaves_nothing() -> None:
    assert plan(limit=GIB).pool_bytes() < 0


@pytest.mark.parametrize(("size", "fits"), [(9 * 100, 0), (10 * 100, 10), (10 * 100 + 99, 10), (1234, 12)])
def test_a_pool_holds_one_longest_sequence_at_least(size: int, fits: int) -> None:
    if fits:
        assert choose_num_blocks(size, block_bytes=100, longest=10, field="kv_cache_memory") == fits
        return
    with pytest.raises(ConfigError) as caught:
        choose_num_blocks(size, block_bytes=100, longest=10, field="kv_cache_memory")
    assert caught.value.field == "kv_cache_memory"
    assert "--max-model-len 144 would fit" in caught.value.message


def test_the_kernels_numbers_are_plausible() -> None:
    assert 0 < memory.proportional_bytes() <= memory.resident_bytes() * 1.5
    assert memory.resident_bytes() <= memory.peak_resident_bytes()
    assert 0 < available_memory() <= memory_limit()
