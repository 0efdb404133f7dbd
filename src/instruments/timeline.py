"""When each bucket was ready, launched and done, as data for tests and figures."""

import json
import threading
import weakref
from typing import Any

import torch.distributed as dist

from instruments.clock import now, seconds_between
from miniddp.bucket import Bucket
from miniddp.ddp import DistributedDataParallel
from miniddp.ddp.reducer import Reducer


class Timeline:
    """Records the backward passes of one rank from now on.

    A bucket is ready with its last gradient, launched when its turn has come, done when its
    all-reduce has finished. On a GPU these are moments of its streams: CUDA events, not of Python,
    which only queues the work.
    """

    def __init__(self, ddp: DistributedDataParallel) -> None:
        self._start = now()
        self._rows: list[dict[str, Any]] = []
        self._marks: list[tuple[str, Any]] = []
        self._open: dict[int, dict[str, Any]] = {}
        self._step = 0
        self._lock = threading.Lock()
        self._attach(ddp.reducer)

    def _attach(self, reducer: Reducer) -> None:
        """Have three methods of the reducer note when they are called.

        What replaces them holds the reducer weakly: else it would keep itself alive.
        """
        here: Any = weakref.proxy(reducer)
        kind = type(reducer)

        def prepare_for_backward(output: Any) -> Any:
            self._step += 1
            self._open = {}
            return kind.prepare_for_backward(here, output)

        def mark_ready(i: int) -> None:
            bucket = here.bucket_of[i]
            if bucket.pending == {i} and here.expecting:
                self._mark(bucket, "ready")
            kind.mark_ready(here, i)

        def launch(bucket: Bucket) -> Any:
            self._mark(bucket, "launched")
            work = kind.launch(here, bucket)
            future = work.get_future() if isinstance(work, dist.Work) else work
            future.add_done_callback(lambda _: self._mark(bucket, "done"))
            return work

        for method in (prepare_for_backward, mark_ready, launch):
            setattr(reducer, method.__name__, method)

    def note(self, name: str) -> None:
        """Note a moment of the training loop, such as the begin of backward."""
        self._marks.append((name, now()))

    def to_json(self) -> str:
        """`{"events": […], "marks": […]}`, times in seconds since the start of the recording.

        An event is a bucket in a step: `{"step", "bucket", "bytes", "ready", "launched", "done"}`.
        A mark is `{"name", "time"}`. On a GPU this waits until the device has done its work.
        """
        events = [
            {
                **row,
                **{
                    name: self._seconds(row[name])
                    for name in ("ready", "launched", "done")
                },
            }
            for row in self._rows
        ]
        marks = [
            {"name": name, "time": self._seconds(moment)}
            for name, moment in self._marks
        ]
        return json.dumps({"events": events, "marks": marks})

    def _seconds(self, moment: Any) -> float:
        return seconds_between(self._start, moment)

    def _mark(self, bucket: Bucket, event: str) -> None:
        moment = now()
        with self._lock:
            if bucket.index() not in self._open:
                about = {"step": self._step, "bucket": bucket.index()}
                self._open[bucket.index()] = {**about, "bytes": bucket.buffer().nbytes}
                self._rows.append(self._open[bucket.index()])
            self._open[bucket.index()][event] = moment
