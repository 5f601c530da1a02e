"""A local cluster for one measurement: float32, quiet, on a free port; what dies is started again at once."""

import sys

from bench.options import ClusterOptions
from cluster.children import Console
from cluster.local_cluster import Cluster
from cluster.plan import ClusterConfig, UpConfig, check, plan
from common.engine.config import EngineConfig
from common.worker.config import WorkerConfig
from router.config import RouterConfig

RESTART_S = (0.1, 1.0)
STEP_TOKENS = 256  # of a step on decode workers, which must have room for a token of each sequence


def own_cluster(options: ClusterOptions, max_num_seqs: int, *, max_queued_requests: int = 1024) -> Cluster:
    """To be entered with `async with`, in the main thread."""
    model, scale = str(options.model), options.deadline_scale
    config = ClusterConfig(
        up=UpConfig(prefill=options.prefill, decode=options.decode),
        router=RouterConfig(
            model=model, port=0, log_level="error", deadline_scale=scale, max_queued_requests=max_queued_requests
        ),
        engine=EngineConfig(
            model=model,
            dtype="float32",
            max_model_len=options.max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_seqs if max_num_seqs > STEP_TOKENS else None,
            kv_cache_memory=options.kv_cache_memory,
        ),
        worker=WorkerConfig(log_level="error", deadline_scale=scale),
    )
    check(config)
    return Cluster(
        plan(config),
        Console(out=sys.stderr),
        startup_s=config.up.startup_timeout,
        grace_s=config.up.shutdown_timeout,
        restart_backoff_s=RESTART_S,
    )
