"""A SLURM cluster on this machine: a controller and some nodes, while it is entered.

Needs Linux, the rights of root, and Debian's packages slurm-wlm and munge. The names of the
nodes, their addresses and ports, and every process live in namespaces of their own. The
machine's own files stay as they are, its ports are not used, and all processes end with the
one that holds the namespaces. A node is a namespace of processes, so that it can be killed
whole, as a power cut does it.
"""

import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

Found = TypeVar("Found")

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "unshare", "nsenter")
SECONDS_TO_START = 20.0
CONFIGURATION = """\
ClusterName=book
SlurmctldHost=controller
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire={wait_to_requeue}
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdSpoolDir={folder}/spool-%n
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=bf_interval=1,sched_interval=5,batch_sched_delay=0,defer
SlurmdParameters=config_overrides
ReturnToService=2
SlurmdTimeout=10
KillWait=5
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
GresTypes=gpu
{nodes}
PartitionName=train Nodes=ALL Default=YES MaxTime=INFINITE State=UP PreemptMode=REQUEUE
PartitionName=cheap Nodes=ALL MaxTime=INFINITE State=UP PreemptMode=CANCEL GraceTime=15
PartitionName=urgent Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF
"""
NODE = "NodeName={name} NodeAddr={name} Port={port} CPUs=8 RealMemory=1000 Gres=gpu:8 State=UNKNOWN"
CGROUPS = (
    "CgroupPlugin=cgroup/v1\nCgroupAutomount=yes\nCgroupMountpoint={folder}/cgroup\n"
)
HOLD = """
set -e
hostname controller
ip link set lo up
mount --bind {folder}/hosts /etc/hosts
grep -v localhost /etc/hosts | while read -r address name; do
    ip address add "$address/24" dev lo
done
echo held
read -r for_ever
"""


class NoClusterError(RuntimeError):
    """This machine cannot be a cluster, or a part of it did not come up."""


@dataclass
class Cluster:
    """What runs, and how to talk to it. `node0`, `node1`, … are the nodes."""

    folder: Path
    holder: int  # the process whose namespaces all others share
    nodes: dict[str, subprocess.Popen[str]] = field(default_factory=dict)

    def start(self, *command: str, **options: Any) -> subprocess.Popen[str]:
        """Start a command on the controller, in the folder `home`."""
        spaces = ("--mount", "--net", "--uts", "--pid")
        there = ("env", f"--chdir={self.home}")
        environment = {
            **os.environ,
            "SLURM_CONF": str(self.folder / "slurm.conf"),
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        }
        return subprocess.Popen(
            ["nsenter", f"--target={self.holder}", *spaces, *there, *command],
            env=environment,
            text=True,
            **options,
        )

    @property
    def home(self) -> Path:
        """The folder that all nodes see, where jobs are queued and write."""
        return self.folder / "home"

    def ask(self, *command: str) -> str:
        """What a command on the controller prints. `RuntimeError` with it if it fails."""
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        with self.start(*command, **pipes) as process:
            printed = process.communicate(timeout=60)[0]
        if process.returncode:
            raise RuntimeError(f"{' '.join(command)}: {printed}")
        return printed.strip()

    def submit(self, script: str, *options: str) -> int:
        """Queue a batch script. What it prints goes to `home/slurm-NUMBER.out`."""
        file = self.home / "train.sbatch"
        file.write_text(script, encoding="utf-8")
        return int(self.ask("sbatch", "--parsable", *options, str(file)).split("_")[0])

    def job(self, number: int | str) -> dict[str, str]:
        """What `scontrol show job` knows: `JobState`, `Reason`, `Restarts`, `NodeList`, …"""
        shown = self.ask("scontrol", "--oneliner", "show", "job", str(number))
        return dict(word.split("=", 1) for word in shown.split() if "=" in word)

    def start_node(self, name: str) -> None:
        """Switch a node on."""
        daemon = f"hostname {name}; slurmd -D -N {name} & wait"
        alone = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "--uts")
        self.nodes[name] = self.start(
            *alone, "bash", "-c", daemon, **self._to_file(name)
        )

    def kill_node(self, name: str) -> None:
        """Every process of the node ends at once, its daemon too."""
        node = self.nodes.pop(name)
        os.kill(_child(node.pid), signal.SIGKILL)
        node.wait()

    def _to_file(self, name: str) -> dict[str, Any]:
        printed = (self.folder / f"{name}.out").open("w")
        return {
            "stdout": printed,
            "stderr": subprocess.STDOUT,
            "stdin": subprocess.DEVNULL,
        }


def wait_for(come: Callable[[], Found], what: str, seconds: float) -> Found:
    """The first truth that `come` returns. `NoClusterError` when `seconds` are over."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if found := come():
            return found
        time.sleep(0.05)
    raise NoClusterError(f"{what} after {seconds:.0f} s")


def missing() -> str:
    """Why this machine cannot be a cluster; empty if it can."""
    if sys.platform != "linux":
        return "namespaces are Linux's"
    if os.geteuid():
        return "only root may start one"
    absent = [name for name in PROGRAMS if not shutil.which(name)]
    return (
        f"not installed: {', '.join(absent)} (packages slurm-wlm, munge)"
        if absent
        else ""
    )


@contextmanager
def slurm(
    nodes: int, wait_to_requeue: int = 5, key: bytes | None = None
) -> Iterator[Cluster]:
    """A cluster of `nodes` nodes with eight imagined cards each.

    `wait_to_requeue`: seconds that a requeued job waits; a cluster's default is 120. `key`:
    munge's. `NoClusterError` says what is missing, or which part has not come up within 20 seconds.
    """
    if reason := missing():
        raise NoClusterError(reason)
    folder = Path(tempfile.mkdtemp(prefix="cluster-"))
    names = [f"node{number}" for number in range(nodes)]
    holder: subprocess.Popen[str] | None = None
    cluster: Cluster | None = None
    try:
        _configure(folder, names, wait_to_requeue, key or secrets.token_bytes(128))
        holder = _hold(folder)
        cluster = Cluster(folder, _child(holder.pid))
        _start_daemons(cluster, names)
        yield cluster
    finally:
        if cluster:
            # The kernel kills all that live in the namespace of a first process.
            os.kill(cluster.holder, signal.SIGKILL)
        if holder:
            holder.wait()
        _remove(folder)


def _configure(
    folder: Path, names: list[str], wait_to_requeue: int, key: bytes
) -> None:
    folder.chmod(0o755)
    (folder / "munge.key").write_bytes(key)
    (folder / "munge.key").chmod(0o400)
    (folder / "home").mkdir()
    (folder / "state").mkdir()
    (folder / "cgroup").mkdir()
    addresses = {"controller": "10.98.0.100"}
    lines = []
    for number, name in enumerate(names):
        addresses[name] = f"10.98.0.{number + 1}"
        lines.append(NODE.format(name=name, port=17000 + number))
    hosts = [f"{address} {name}\n" for name, address in addresses.items()]
    (folder / "hosts").write_text("127.0.0.1 localhost\n" + "".join(hosts))
    for card in range(8):
        (folder / f"gpu{card}").touch()
    (folder / "gres.conf").write_text(f"Name=gpu File={folder}/gpu[0-7]\n")
    (folder / "cgroup.conf").write_text(CGROUPS.format(folder=folder))
    text = CONFIGURATION.format(
        folder=folder, wait_to_requeue=wait_to_requeue, nodes="\n".join(lines)
    )
    (folder / "slurm.conf").write_text(text)


def _hold(folder: Path) -> subprocess.Popen[str]:
    """A process in new namespaces, which ends if this one does."""
    apart = ("unshare", "--mount", "--net", "--uts", "--pid", "--fork", "--kill-child")
    holder = subprocess.Popen(
        [*apart, "--mount-proc", "bash", "-c", HOLD.format(folder=folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert holder.stdout
    if holder.stdout.readline() != "held\n":
        holder.kill()
        raise NoClusterError(f"no namespaces: {holder.communicate()[1].strip()}")
    return holder


def _child(process: int) -> int:
    return int(Path(f"/proc/{process}/task/{process}/children").read_text().split()[0])


def _start_daemons(cluster: Cluster, names: list[str]) -> None:
    folder = cluster.folder
    socket = folder / "munge.socket"
    files = [
        f"--{kind}-file={folder}/munge.{kind}" for kind in ("key", "pid", "log", "seed")
    ]
    command = ("munged", "--foreground", "--force", f"--socket={socket}", *files)
    munged = _daemon(cluster, *command)
    _until(socket.exists, munged, "munged", folder / "munged.out")
    controller = _daemon(cluster, "slurmctld", "-D")
    _until(lambda: _answers(cluster), controller, "slurmctld", folder / "slurmctld.log")
    for name in names:
        cluster.start_node(name)
    for name in names:
        node = cluster.nodes[name]
        _until(
            partial(is_idle, cluster, name),
            node,
            name,
            folder / f"slurmd-{name}.log",
        )


def _daemon(cluster: Cluster, *command: str) -> subprocess.Popen[str]:
    return cluster.start(*command, **cluster._to_file(command[0]))


def _until(
    come: Callable[[], bool], daemon: subprocess.Popen[str], name: str, log: Path
) -> None:
    def come_or_ended() -> bool:
        return come() or daemon.poll() is not None

    try:
        wait_for(come_or_ended, f"{name} has not come up", SECONDS_TO_START)
        if daemon.poll() is not None:
            raise NoClusterError(f"{name} has ended with exit code {daemon.returncode}")
    except NoClusterError as error:
        said = log.read_text()[-1000:] if log.exists() else ""
        raise NoClusterError(f"{error}: {said}") from None


def _answers(cluster: Cluster) -> bool:
    try:
        return "UP" in cluster.ask("scontrol", "ping")
    except RuntimeError:
        return False


def is_idle(cluster: Cluster, name: str) -> bool:
    """Whether the node is there, and has no job."""
    return (
        cluster.ask("sinfo", "--noheader", f"--nodes={name}", "--format=%T").split()[0]
        == "idle"
    )


def _remove(folder: Path) -> None:
    """A daemon that is being killed may still write."""
    for _ in range(20):
        shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists():
            return
        time.sleep(0.1)
