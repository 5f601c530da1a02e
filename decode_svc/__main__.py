"""A decode worker: python -m decode_svc."""

import sys
from collections.abc import Sequence

from common.engine.config import DECODE_TOKENS
from common.rpc.channel import channel_opener
from common.worker.process import Worker, run_worker
from decode_svc.service import DecodeService
from kvtransfer.connection import permit_all
from kvtransfer.reader import KVReader
from kvtransfer.transport import choose


def start(worker: Worker) -> DecodeService:
    """The service over the worker's engine, with a reader for other workers' KV."""
    reader = KVReader(
        worker.built.pool,
        worker.built.layout,
        worker.info.fingerprint,
        worker.deadlines,
        worker.awake,
        transports=choose(worker.settings.transport),
        channel=channel_opener(worker.server.security),
        permit=worker.others.check if worker.calls_whom_it_knows else permit_all,
    )
    return DecodeService(worker, reader)


def main(argv: Sequence[str] | None = None) -> int:
    return run_worker("decode", start, argv, max_num_batched_tokens=DECODE_TOKENS, shared_pool=False)


if __name__ == "__main__":
    sys.exit(main())
