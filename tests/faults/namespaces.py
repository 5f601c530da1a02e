"""The cluster's workers on hosts of their own: network and PID namespaces, on one bridge, in a namespace of the test's.

All of it ends with the processes in it: nothing of this host is changed.
"""

import asyncio
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TextIO

from cluster.parent_death import dying_with_parent
from tests.faults.cluster import FaultCluster
from tests.faults.processes import WORKERS
from tests.faults.proxy import Proxy
from tests.faults.tools import eventually

INSIDE = "KVRELAY_FAULTS_INSIDE"  # set in the test's own namespace
TOOLS = ("ip", "unshare", "nsenter", "tc")
GATEWAY = "10.213.0.1"
WAIT = 'until ip addr show kv0 2>/dev/null | grep -q " inet "; do sleep 0.02; done; exec "$@"'


def missing() -> str:
    """Why it can't be done here; "" if it can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "network namespaces need root on Linux"
    tools = [tool for tool in TOOLS if shutil.which(tool) is None]
    return f"not installed: {', '.join(tools)}" if tools else ""


def run_inside(*command: str) -> int:
    """Runs a command in a network namespace of its own, which has this cluster's bridge; its exit status."""
    setup = f"ip link set lo up; ip link add kvbr type bridge; ip addr add {GATEWAY}/24 dev kvbr; ip link set kvbr up"
    shell = ("sh", "-e", "-c", f'{setup}; exec "$@"', "sh", *command)
    done = subprocess.run(
        dying_with_parent(("unshare", "--net", "--fork", "--kill-child", *shell)),
        env=os.environ | {INSIDE: "1"},
        check=False,
    )
    return done.returncode


def run(*command: str) -> bool:
    """Whether the command ended well."""
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def must(*command: str) -> None:
    subprocess.run(command, check=True)


class NamespacedCluster(FaultCluster):
    """No proxies before the workers: their links go down, or are slow."""

    def __init__(self, model: Path, log: TextIO) -> None:
        super().__init__(model, log)
        self.proxies["redis"] = Proxy(self._ports["redis"], host=GATEWAY)

    def link(self, name: str, *, up: bool) -> None:
        """Takes a worker off the network, or puts it back on."""
        must("ip", "link", "set", _link(name), "up" if up else "down")

    def slow(self, name: str) -> str:
        """Makes a worker's link slow, in the worst way that this kernel can; which one."""
        for kind in ("netem delay 20ms 5ms loss 2%", "tbf rate 20mbit burst 64kb latency 100ms"):
            if run("tc", "qdisc", "replace", "dev", _link(name), "root", *kind.split()):
                return kind
        return ""

    async def busy(self, role: str) -> str:
        """The first worker of this role that has an attempt; waits for one."""

        async def one() -> str | None:
            names = [name for name in WORKERS if name.startswith(role)]
            counts = await asyncio.gather(*(self.metric(name, "num_attempts") for name in names))
            return next((name for name, count in zip(names, counts, strict=True) if count), None)

        return str(await eventually(one, f"an attempt on a {role} worker"))

    def _host(self, name: str) -> str:
        return f"10.213.0.{10 + WORKERS.index(name)}" if name in WORKERS else "127.0.0.1"

    def _advertised(self, name: str) -> str:
        return f"{self._host(name)}:{self._ports[name]}" if name in WORKERS else f"{GATEWAY}:{self.proxies[name].port}"

    def _command(self, name: str, module: str, *flags: str) -> tuple[str, ...]:
        command = super()._command(name, module, *flags)
        if name not in WORKERS:
            return command
        return ("unshare", "--net", "--pid", "--fork", "--kill-child", "--mount-proc", "sh", "-c", WAIT, name, *command)

    async def _spawned(self, name: str, pid: int) -> None:
        """Its end of a cable: the other one is in the bridge."""
        if name not in WORKERS:
            return
        own = os.readlink("/proc/self/ns/net")

        async def apart() -> bool:
            return os.readlink(f"/proc/{pid}/ns/net") != own

        await eventually(apart, f"{name} has a network namespace of its own")
        run("ip", "link", "del", _link(name))  # of its last life
        must("ip", "link", "add", _link(name), "type", "veth", "peer", "name", "kv0", "netns", str(pid))
        must("ip", "link", "set", _link(name), "master", "kvbr", "up")
        inside = ("nsenter", "--target", str(pid), "--net", "ip")
        must(*inside, "link", "set", "lo", "up")
        must(*inside, "link", "set", "kv0", "up")
        must(*inside, "addr", "add", f"{self._host(name)}/24", "dev", "kv0")


def _link(name: str) -> str:
    return f"kv-{name}"
