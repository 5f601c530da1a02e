"""A role under the profile is the same process, and its costliest functions come first."""

import cProfile

import pytest

from bench.router.profiled import describe, profiled, top
from cluster.children import ChildSpec


def spec(name):
    return ChildSpec(name, ("python", "-P", "-m", name, "--port=0", "--model=m"), essential=name == "router")


def test_one_process_of_a_stage_is_wrapped_with_its_flags(tmp_path):
    stages = ((spec("redis"),), (spec("decode"), spec("router")))
    (one,), (other, wrapped) = profiled(stages, "router", tmp_path / "file")
    assert (one, other) == (stages[0][0], stages[1][0])
    assert wrapped.command == (
        *("python", "-P", "-m", "bench.router.profiled", str(tmp_path / "file"), "router", "--port=0", "--model=m"),
    )
    assert wrapped.essential


def busy(times):
    return sum(i * i for i in range(times))


def idle():
    return None


def test_the_functions_that_take_most_come_first(tmp_path):
    profile = cProfile.Profile()
    profile.enable()
    for _ in range(20):
        busy(20_000)
        idle()
    profile.disable()
    profile.dump_stats(tmp_path / "file")
    first, *others = top(tmp_path / "file", 3, tokens=10)
    assert any("<genexpr>" in one["function"] for one in (first, others[0]))  # or sum(), which runs it
    assert first["share"] >= max(one["share"] for one in others)
    assert sum(one["share"] for one in (first, *others)) <= 1.001
    assert next(one for one in (first, *others) if one["function"].endswith(" busy"))["calls_token"] == 2


@pytest.mark.parametrize(
    ("place", "text"),
    [
        (("/a/venv/lib/asyncio/queues.py", 149, "get"), "asyncio/queues.py:149 get"),
        (("~", 0, "<built-in method loads>"), "<built-in method loads>"),
    ],
)
def test_a_function_is_named_as_people_look_for_it(place, text):
    assert describe(place) == text
