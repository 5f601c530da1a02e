"""With a cluster key the registry lists signed records alone, and names what it ignores in one line."""

import json
import logging
from dataclasses import replace

import pytest
from redis.asyncio import Redis

from common.cluster_key import ClusterKey
from common.discovery.registry import Registry
from common.discovery.signed_records import BadSignature, check, signed
from tests.support.redis_tools import QUICK, a_record, lines_of

KEY, OTHER = ClusterKey("the key of this cluster"), ClusterKey("the key of another one")
RECORD = a_record()


def test_a_record_survives_signing_whoever_reads_it() -> None:
    text = signed(RECORD.to_json(), "here", KEY)
    check(text, "here", KEY)
    assert type(RECORD).from_json(text) == RECORD


def test_fields_of_a_newer_version_are_signed_as_well() -> None:
    newer = json.dumps(json.loads(RECORD.to_json()) | {"zone": "a"})
    text = signed(newer, "here", KEY)
    check(text, "here", KEY)
    with pytest.raises(BadSignature):
        check(text.replace('"zone": "a"', '"zone": "b"'), "here", KEY)


def forged() -> dict[str, str]:
    data = json.loads(signed(RECORD.to_json(), "test", KEY))
    changes = {"address": "10.0.0.1:1", "epoch": 8, "leaving": True, "worker_id": "other", "signature": "00" * 32}
    changed = {name: json.dumps(data | {name: value}) for name, value in changes.items()}
    return {
        **changed,
        "unsigned": RECORD.to_json(),
        "no text": json.dumps(data | {"signature": 7}),
        "no hexadecimal": json.dumps(data | {"signature": "\ud800"}),
        "key": signed(RECORD.to_json(), "test", OTHER),
        "namespace": signed(RECORD.to_json(), "elsewhere", KEY),
    }


@pytest.mark.parametrize("text", forged().values(), ids=forged().keys())
async def test_a_forged_record_is_ignored_with_one_line_that_names_it(
    redis: Redis, caplog: pytest.LogCaptureFixture, text: str
) -> None:
    honest = replace(RECORD, worker_id="honest")
    registry = Registry(redis, "test", QUICK, key=KEY)
    await registry.announce(honest)
    await redis.set("test:worker:forged", text)
    await redis.sadd("test:workers", "forged")
    for _ in range(3):
        assert await registry.workers() == [honest]
    assert lines_of(caplog) == ["ignored a forged record"]
    (values,) = (record.values for record in caplog.records if record.levelno == logging.WARNING)  # type: ignore[attr-defined]
    assert values["worker"] == "forged"


async def test_without_a_key_signed_records_are_read_as_ever(redis: Redis) -> None:
    await Registry(redis, "test", QUICK, key=KEY).announce(RECORD)
    assert await Registry(redis, "test", QUICK).workers() == [RECORD]
