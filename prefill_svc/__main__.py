"""A prefill worker: python -m prefill_svc."""

import sys
from collections.abc import Sequence

from common.engine.config import PREFILL_TOKENS
from common.worker.process import Worker, run_worker
from kvtransfer.holder import KVHolder
from kvtransfer.lease import LeaseTable
from kvtransfer.transport import choose, holders
from prefill_svc.service import PrefillService


def start(worker: Worker) -> PrefillService:
    """The service over the worker's engine, with its pool offered to readers."""
    leases = LeaseTable(worker.awake, worker.deadlines, worker.info.epoch, worker.engine.free_blocks)
    holder = KVHolder(
        leases,
        fingerprint=worker.info.fingerprint,
        layout_id=worker.info.layout_id,
        transports=holders(choose(worker.settings.transport), worker.built.pool),
        deadlines=worker.deadlines,
        clock=worker.awake,
    )
    return PrefillService(worker, leases, holder)


def main(argv: Sequence[str] | None = None) -> int:
    return run_worker("prefill", start, argv, max_num_batched_tokens=PREFILL_TOKENS, shared_pool=True)


if __name__ == "__main__":
    sys.exit(main())
