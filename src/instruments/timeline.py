"""When each bucket was ready, launched and done, as data for tests and figures."""

import json
import threading
import time
from typing import Any

import torch.distributed as dist

from miniddp.bucket import Bucket


class Timeline:
    """Records the events of one rank's backward passes. Times are seconds since `start`.

    `events` holds one dictionary per bucket and pass:
    `{"step", "bucket", "bytes", "ready", "launched", "done"}`. A bucket is ready with its last
    gradient, launched when its turn has come, done when its all-reduce has finished.
    """

    def __init__(self) -> None:
        self.start = time.perf_counter()
        self.events: list[dict[str, float]] = []
        self.marks: list[dict[str, float | str]] = []
        self._open: dict[int, dict[str, float]] = {}
        self._step = 0
        self._lock = threading.Lock()

    def now(self) -> float:
        """Seconds since the start of the recording."""
        return time.perf_counter() - self.start

    def note(self, name: str) -> None:
        """Note a moment of the training loop, such as the begin of backward."""
        self.marks.append({"name": name, "time": self.now()})

    def next_step(self) -> None:
        """Open a new step: later events belong to it."""
        self._step += 1
        self._open = {}

    def mark(self, bucket: Bucket, event: str) -> None:
        """Note that the bucket is "ready", "launched" or "done" now."""
        now = self.now()
        with self._lock:
            row = self._open.get(bucket.index())
            if row is None:
                buffer = bucket.buffer()
                row = {
                    "step": self._step,
                    "bucket": bucket.index(),
                    "bytes": buffer.numel() * buffer.element_size(),
                }
                self._open[bucket.index()] = row
                self.events.append(row)
            row[event] = now

    def mark_when_done(self, bucket: Bucket, work: Any) -> None:
        """Note the end of the communication, from the thread in which it ends."""
        future = work.get_future() if isinstance(work, dist.Work) else work
        future.add_done_callback(lambda _: self.mark(bucket, "done"))

    def to_json(self) -> str:
        """All events and marks, as JSON."""
        return json.dumps({"events": self.events, "marks": self.marks})
