"""When each bucket was ready, launched and done, as data for tests and figures."""

import json
import threading
from functools import partial
from typing import Any

import torch.distributed as dist

from instruments.clock import now, seconds_between
from miniddp.bucket import Bucket
from miniddp.ddp import DistributedDataParallel


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
        reducer: Any = ddp.reducer
        reducer.prepare_for_backward = partial(self._prepare, reducer.prepare_for_backward)
        reducer.put_into_bucket = partial(self._put, reducer, reducer.put_into_bucket)
        reducer.launch = partial(self._launch, reducer.launch)

    def note(self, name: str) -> None:
        """Note a moment of the training loop, such as the begin of backward."""
        self._marks.append((name, now()))

    def to_json(self) -> str:
        """`{"events": […], "marks": […]}`, times in seconds since the start of the recording.

        An event is a bucket in a step: `{"step", "bucket", "bytes", "ready", "launched", "done"}`.
        A mark is `{"name", "time"}`. On a GPU this waits until the device has done its work.
        """
        events = [
            {**row, **{name: self._seconds(row[name]) for name in ("ready", "launched", "done")}}
            for row in self._rows
        ]
        marks = [{"name": name, "time": self._seconds(moment)} for name, moment in self._marks]
        return json.dumps({"events": events, "marks": marks})

    def _seconds(self, moment: Any) -> float:
        return seconds_between(self._start, moment)

    def _prepare(self, prepare: Any, output: Any) -> Any:
        self._step += 1
        self._open = {}
        return prepare(output)

    def _put(self, reducer: Any, put: Any, i: int) -> None:
        put(i)
        bucket = reducer.place_of[i][0]
        if bucket.pending == 0:
            self._mark(bucket, "ready")

    def _launch(self, launch: Any, bucket: Bucket) -> Any:
        self._mark(bucket, "launched")
        work = launch(bucket)
        future = work.get_future() if isinstance(work, dist.Work) else work
        future.add_done_callback(lambda _: self._mark(bucket, "done"))
        return work

    def _mark(self, bucket: Bucket, event: str) -> None:
        moment = now()
        with self._lock:
            if bucket.index() not in self._open:
                about = {"step": self._step, "bucket": bucket.index()}
                self._open[bucket.index()] = {**about, "bytes": bucket.buffer().nbytes}
                self._rows.append(self._open[bucket.index()])
            self._open[bucket.index()][event] = moment
