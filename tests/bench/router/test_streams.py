"""What the router takes for streams is told for each level, and given back after it."""

import json

from bench.options import StreamsOptions
from bench.router.streams import measure
from common.settings import Bytes
from tests.support.checkpoints import make_random_checkpoint
from tests.support.process_tools import linux


@linux
async def test_whole_streams(tmp_path, capsys):
    model = make_random_checkpoint(tmp_path / "tiny")
    options = StreamsOptions(
        model=str(model), streams="3,5", rounds=1, output_tokens=64, vocab_size=288,
        kv_cache_memory=Bytes(4 * 2**20), json=True,
    )  # fmt: skip
    assert await measure(options) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(row["streams"], row["failed"], row["leaked"]) for row in rows] == [(0, 0, 0), (3, 0, 0), (5, 0, 0)]
    assert [row["tokens_per_s"] > 0 for row in rows] == [False, True, True]
    assert all(row["rss_mb"] > 0 and row["health_ms_p50"] > 0 for row in rows)
    assert rows[2]["open_files_after"] <= rows[0]["open_files_after"] + 2
