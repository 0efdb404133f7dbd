"""What is noted of torch's calls between ranks, and of files."""

import os
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.join import Join
from torch.utils import _pytree as pytree

from miniddp.check.finding import Event
from miniddp.check.probe import Call, Notes, stand_around
from miniddp.check.recorder import Recorder, user_line
from miniddp.check.samples import Sample
from miniddp.check.trained import Trained

COLLECTIVES = (
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_reduce",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "broadcast",
    "broadcast_object_list",
    "gather",
    "gather_object",
    "monitored_barrier",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "scatter",
    "scatter_object_list",
)
SAME_SHAPE = ("all_reduce", "broadcast", "reduce")
ROOTS = {
    "broadcast": (1, "src"),
    "broadcast_object_list": (1, "src"),
    "gather": (2, "dst"),
    "gather_object": (2, "dst"),
    "reduce": (1, "dst"),
    "scatter": (2, "src"),
    "scatter_object_list": (2, "src"),
}
"""Which argument says from or to which rank."""
FEW = 8
"""So many numbers that are summed are noted as they are."""
MOST_FILES = 1000
"""So many files are noted, each once: a script may write for days."""
POINT_TO_POINT = ("send", "recv", "isend", "irecv", "batch_isend_irecv")


def install(recorder: Recorder, trained: Trained) -> None:
    probes = CallProbes(recorder, trained)
    for name in COLLECTIVES:
        stand_around(recorder, dist, name, probes.collective)
    for name in POINT_TO_POINT:
        stand_around(recorder, dist, name, probes.point_to_point)
    stand_around(recorder, torch, "save", probes.save)
    sys.addaudithook(probes.audit)
    stand_around(recorder, torch, "load", probes.load)
    stand_around(recorder, Join, "__enter__", probes.join)


class CallProbes:
    def __init__(self, recorder: Recorder, trained: Trained) -> None:
        self.recorder = recorder
        self.trained = trained
        self.in_collective = False
        self.files: set[str] = set()

    def collective(self, call: Call) -> Notes:
        if self.in_collective:
            yield
            return
        tensor = call.argument(0, "tensor")
        has_shape = call.name in SAME_SHAPE and isinstance(tensor, Tensor)
        shape = f"{tuple(tensor.shape)} {tensor.dtype}" if has_shape else None
        group = group_name(call)
        operation = operation_of(call)
        if self.recorder.is_watching:
            event = self.recorder.note(
                "collective",
                operation=operation,
                line=user_line(),
                group=group,
                shape=shape,
                elements=tensor.numel() if isinstance(tensor, Tensor) else 1,
                by_script=True,
                in_backward=self.recorder.place.get("operation") == "backward",
            )
            if has_shape:
                self.note_what(event, tensor)
            if call.name == "all_reduce" and has_shape:
                op = call.argument(1, "op")
                if op in (None, dist.ReduceOp.SUM) and tensor.numel() <= FEW:
                    event["summed"] = tensor.detach().flatten().clone()
        self.in_collective = True
        try:
            with self.recorder.inside(operation, group, shape):
                yield
        finally:
            self.in_collective = False

    def note_what(self, event: Event, tensor: Tensor) -> None:
        """If a gradient is averaged by hand: which, and what it was."""
        name = self.trained.gradient_at(tensor.data_ptr())
        if name is not None:
            event["gradient"] = name
            event["before"] = Sample({name: tensor})
        event["is_weight"] = tensor.data_ptr() in self.trained.weights
        event["is_flat"] = 1 < tensor.numel() == self.trained.elements

    def point_to_point(self, call: Call) -> Notes:
        if self.recorder.is_watching:
            self.recorder.note("point to point", line=user_line())
        rank = dist.get_rank()
        source = call.argument(1, "src") if call.name == "recv" else rank
        target = call.argument(1, "dst") if call.name == "send" else rank
        message = f"the message from rank {source} to rank {target}"
        with self.recorder.inside(message, group=""):
            yield

    def save(self, call: Call) -> Notes:
        self.note_file(call.argument(1, "f"))
        yield

    def audit(self, event: str, args: tuple[Any, ...]) -> None:
        """Called for each file that Python opens, which must not fail by it."""
        if event != "open" or not isinstance(args[1], str):
            return
        if args[1][:1] not in ("w", "x"):
            return
        try:
            self.note_file(args[0])
        except Exception as error:
            self.recorder.give_up(error)

    def note_file(self, file: Any) -> None:
        """A directory is that of a temporary file without a name."""
        line = user_line()
        is_path = isinstance(file, str | os.PathLike)
        if not is_path or not line or os.path.isdir(file):
            return
        path = os.path.realpath(file)
        if path in self.files or len(self.files) == MOST_FILES:
            return
        self.files.add(path)
        host = os.uname().nodename
        self.recorder.note("save", line=line, path=path, host=host)

    def load(self, call: Call) -> Notes:
        yield
        gpus = {
            value.get_device()
            for value in pytree.tree_leaves(call.result)
            if isinstance(value, Tensor) and value.get_device() >= 0
        }
        elsewhere = gpus - {torch.cuda.current_device()} if gpus else gpus
        if elsewhere and call.argument(1, "map_location") is None:
            line = user_line()
            self.recorder.note("load", line=line, elsewhere=min(elsewhere))

    def join(self, call: Call) -> Notes:
        self.recorder.note("join", line=user_line())
        yield


def operation_of(call: Call) -> str:
    """`all_reduce`, or `broadcast from rank 0`: all have to name one root."""
    if call.name not in ROOTS:
        return call.name
    position, name = ROOTS[call.name]
    preposition = "from" if name == "src" else "to"
    root = call.argument(position, name) or 0
    return f"{call.name} {preposition} rank {root}"


def group_name(call: Call) -> str:
    """Of the process group in which a call is; `""` is that of all ranks."""
    values: list[Any] = [*call.args, *call.keywords.values()]
    for value in values:
        is_group = isinstance(value, dist.ProcessGroup)
        if is_group and value is not dist.group.WORLD:
            return str(value.group_name)
    return ""
