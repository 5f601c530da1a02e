"""A pinned child gets the cores, the threads and the input it should, and its failures are one line."""

import json
import os
import sys

import pytest

from bench.pinned import cpus, module_command, run_child, run_pinned
from common.errors import ConfigError, KVRelayError

SAYS_WHERE = """
import json, os, sys
print("not JSON")
print([1])
print(json.dumps({"cpus": sorted(os.sched_getaffinity(0)), "threads": os.environ["OMP_NUM_THREADS"]}))
print(json.dumps({"stdin": sys.stdin.read()}))
"""


def python(code):
    return [sys.executable, "-c", code]


async def test_a_child_has_as_many_cores_and_threads_as_asked_for():
    where, read = await run_pinned(python(SAYS_WHERE), 1, 30.0, stdin="something")
    assert where == {"cpus": list(cpus(1)), "threads": "1"}
    assert read == {"stdin": "something"}


def test_cores_are_the_last_that_this_process_may_use():
    allowed = sorted(os.sched_getaffinity(0))
    assert cpus(1) == (allowed[-1],)
    assert cpus(len(allowed)) == tuple(allowed)
    with pytest.raises(ConfigError, match="cores") as caught:
        cpus(len(allowed) + 1)
    assert caught.value.field == "cores"


@pytest.mark.parametrize(
    ("command", "problem"),
    [
        (python("raise SystemExit(3)"), "exit status 3"),
        (python("import os; os.kill(os.getpid(), 9)"), "killed by SIGKILL"),
        (["/no/such/program"], "can't run"),
        (python("import json; print(json.dumps({'error': 'no such model'}))"), "^no such model$"),
    ],
)
async def test_a_child_that_fails_is_an_error(command, problem):
    with pytest.raises(KVRelayError, match=problem):
        await run_pinned(command, 1, 30.0)


async def test_a_child_that_takes_too_long_is_ended(tmp_path):
    code = f"import os, time; open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid())); time.sleep(60)"
    with pytest.raises(KVRelayError, match="has not ended"):
        await run_pinned(python(code), 1, 1.0)
    pid = int((tmp_path / "pid").read_text())
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_module_gets_its_options_as_json():
    assert json.loads(module_command("bench.step.step_worker", {"cores": 1})[-1]) == {"cores": 1}
    assert module_command("bench.router.inprocess")[-1] == "bench.router.inprocess"


def test_an_error_of_ours_is_a_childs_last_answer(capsys):
    def fail():
        raise ConfigError("no such model")

    run_child(fail)
    assert json.loads(capsys.readouterr().out) == {"error": "no such model"}
