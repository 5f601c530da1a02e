"""A local cluster for one measurement: float32, quiet, on a free port; what dies is started again at once."""

import sys

from bench.options import ClusterOptions
from cli.child import Console
from cli.cluster import Cluster
from cli.up import ClusterConfig, UpConfig, check, plan
from common.config import EngineConfig, RouterConfig, WorkerConfig

RESTART_S = (0.1, 1.0)


def own_cluster(options: ClusterOptions, max_num_seqs: int, *, log_level: str = "error") -> Cluster:
    """To be entered with `async with`, in the main thread."""
    model, scale = str(options.model), options.deadline_scale
    config = ClusterConfig(
        up=UpConfig(prefill=options.prefill, decode=options.decode),
        router=RouterConfig(model=model, port=0, log_level=log_level, deadline_scale=scale),
        engine=EngineConfig(
            model=model,
            dtype="float32",
            max_model_len=options.max_model_len,
            max_num_seqs=max_num_seqs,
            kv_cache_memory=options.kv_cache_memory,
        ),
        worker=WorkerConfig(log_level=log_level, deadline_scale=scale),
    )
    check(config)
    return Cluster(
        plan(config),
        Console(out=sys.stderr),
        startup_s=config.up.startup_timeout,
        grace_s=config.up.shutdown_timeout,
        restart_backoff_s=RESTART_S,
    )
