"""How the notes of all ranks come together, whatever the ranks are doing.

Through the store beside the process group, in a thread of its own: a rank that
waits in a collective, or has ended, keeps nobody from reading what it said.
"""

import json
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from miniddp.check.finding import Event, Run
from miniddp.check.recorder import Recorder, Rows, Sample, line_of, user_frames
from miniddp.check.report import say

TICK_SECONDS = 0.2
PATIENCE_SECONDS = 5.0
"""Where no rank moves for so long, it may be a hang."""
ANSWER_SECONDS = 2.0
"""How long a rank that has been asked for its notes may take."""
LAST_WAIT_SECONDS = 5.0
"""How long a rank that has ended waits for the notes of the others."""


class Exchange(threading.Thread):
    """Tells the others where this rank is, and reads what they tell.

    `report(run)` is called on one rank: when all have taken their steps, when
    the job hangs, and in the end.
    """

    def __init__(
        self,
        recorder: Recorder,
        store: Any,
        rank: int,
        world_size: int,
        timeout: float,
        report: Callable[[Run], None],
    ) -> None:
        super().__init__(daemon=True)
        self.recorder = recorder
        self.script_store = store
        """Kept, as rank 0's may be the server of all."""
        self.store = store.clone()
        self.rank = rank
        self.world_size = world_size
        self.patience = min(PATIENCE_SECONDS, timeout / 3)
        self.report = report
        self.main_thread = threading.main_thread().ident
        self.is_over = threading.Event()
        self.published = 0
        self.resolved = 0
        self.stack: list[Any] = []
        self.still_since = time.monotonic()
        self.has_reported_steps = False
        self.last_beats: list[Event] = []
        self.heard: list[float] = [time.monotonic()] * world_size
        self.store.set_timeout(timedelta(seconds=LAST_WAIT_SECONDS))
        self.beat(is_done=False)

    def key(self, name: str, rank: int) -> str:
        return f"miniddp.check/{name}/{rank}"

    def run(self) -> None:
        while not self.is_over.wait(TICK_SECONDS):
            try:
                self.tick()
            except dist.DistError:  # the store has ended
                return
            except Exception as error:
                say(f"miniddp.check: gave up: {error!r}")
                return

    def tick(self) -> None:
        self.resolve()
        self.beat(is_done=False)
        if self.wanted(0) > self.published:
            self.publish()
        beats = self.beats()
        if self.hangs(beats) and self.is_first("hang"):
            self.report(self.gather(stuck=beats))
        has_watched = [beat["has_watched"] for beat in beats]
        all_over = has_watched.count(True) == self.world_size
        if self.rank == 0 and all_over and not self.has_reported_steps:
            self.has_reported_steps = True
            self.report(self.gather())

    def finish(self, has_failed: bool) -> None:
        """The script has ended here. One rank waits for the others' notes."""
        self.is_over.set()
        self.join(LAST_WAIT_SECONDS)
        try:
            self.resolve()
            self.beat(is_done=True, has_failed=has_failed)
            self.publish()
            if (self.rank == 0 or has_failed) and self.is_first("end"):
                if not has_failed:
                    self.wait_for_the_end()
                self.report(self.gather(self.left_alone(has_failed)))
        except dist.DistError:
            pass  # the store has ended before us: another rank had the word
        except Exception as error:
            say(f"miniddp.check: gave up: {error!r}")

    def left_alone(self, has_failed: bool) -> list[Event]:
        """Where the ranks are, if a call here broke off as others had ended."""
        place = self.recorder.broken_place
        beats = self.beats()
        mine = beats[self.rank]
        mine.update(is_done=False, place=place, stack=[place.get("line", "")])
        has_ended = any(beat["is_done"] for beat in beats)
        mine["has_failed"] = False
        others_failed = any(beat["has_failed"] for beat in beats)
        is_alone = has_failed and has_ended and not others_failed
        return beats if is_alone and place.get("group") == "" else []

    def wait_for_the_end(self) -> None:
        deadline = time.monotonic() + LAST_WAIT_SECONDS
        while time.monotonic() < deadline:
            done = [beat["is_done"] for beat in self.beats()]
            if done.count(True) == self.world_size:
                return
            time.sleep(TICK_SECONDS / 4)

    def is_first(self, occasion: str) -> bool:
        return bool(self.store.add(self.key(occasion, 0), 1) == 1)

    def wanted(self, more: int) -> int:
        return int(self.store.add(self.key("wanted", 0), more))

    def beat(self, is_done: bool, has_failed: bool = False) -> None:
        frame = sys._current_frames().get(self.main_thread or 0)
        stack = []
        inner = frame
        while inner is not None:
            stack.append((inner.f_code, inner.f_lasti))
            inner = inner.f_back
        if stack != self.stack:
            self.stack = stack
            self.still_since = time.monotonic()
        lines = [
            f"{line_of(outer)} in {outer.f_code.co_name}"
            for outer in user_frames(frame)
        ]
        place = dict(self.recorder.place)
        beat = {
            "place": place,
            "still": time.monotonic() - self.still_since,
            "stack": lines,
            "is_done": is_done,
            "has_failed": has_failed,
            "has_watched": is_done or not self.recorder.is_watching,
            "time": time.time(),
        }
        self.store.set(self.key("beat", self.rank), json.dumps(beat))

    def beats(self) -> list[Event]:
        keys = [self.key("beat", rank) for rank in range(self.world_size)]
        if not self.store.check(keys):
            return []
        return [json.loads(text) for text in self.store.multi_get(keys)]

    def hangs(self, beats: list[Event]) -> bool:
        """No rank moves: they wait for different things, or for one gone."""
        if len(beats) < self.world_size:
            return False
        running = [beat for beat in beats if not beat["is_done"]]
        if any(beat["still"] < self.patience for beat in running):
            return False
        if any(beat["place"].get("group") is None for beat in running):
            return False
        if len(running) < len(beats):
            return bool(running)
        places = {
            (beat["place"]["operation"], beat["place"]["shape"])
            for beat in running
        }
        return len(places) > 1

    def publish(self) -> None:
        self.resolve()
        self.published = self.wanted(0)
        copies = [dict(event) for event in list(self.recorder.events)]
        events = json.dumps(copies, default=plain)
        self.store.set(self.key("events", self.rank), events)
        self.store.set(self.key("answered", self.rank), str(self.published))

    def gather(self, stuck: list[Event] | None = None) -> Run:
        """The notes of all ranks, of those that answer."""
        number = self.wanted(1)
        self.publish()
        keys = [self.key("answered", rank) for rank in range(self.world_size)]
        deadline = time.monotonic() + ANSWER_SECONDS
        while time.monotonic() < deadline:
            if self.store.check(keys):
                answers = self.store.multi_get(keys)
                beats = self.beats()
                if all(
                    int(answer) >= number or beat["is_done"]
                    for answer, beat in zip(answers, beats, strict=True)
                ):
                    break
            time.sleep(TICK_SECONDS / 4)
        events = []
        for rank in range(self.world_size):
            key = self.key("events", rank)
            is_there = self.store.check([key])
            events.append(json.loads(self.store.get(key)) if is_there else [])
        return Run(events, stuck or [])

    def resolve(self) -> None:
        """Make digests of samples, and numbers of tensors, for JSON."""
        events = self.recorder.events
        for event in events[self.resolved :]:
            for key, value in list(event.items()):
                event[key] = plain(value)
        self.resolved = max(0, len(events) - 8)  # some are still being written


def plain(value: Any) -> Any:
    if isinstance(value, Sample | Rows):
        return value.digests()
    if isinstance(value, list):
        return [plain(item) for item in value]
    if hasattr(value, "tolist"):
        return value.tolist()
    return value
