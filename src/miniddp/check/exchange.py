"""How the notes of all ranks come together, whatever the ranks are doing.

Through the store beside the process group, in a thread of its own: a rank that
waits in a collective, or has ended, keeps nobody from reading what it said.
"""

import json
import sys
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor

from miniddp.check.finding import Event, Run
from miniddp.check.order import call
from miniddp.check.recorder import Recorder, line_of, user_frames
from miniddp.check.report import say
from miniddp.check.samples import Rows, Sample

TICK_SECONDS = 0.2
PATIENCE_SECONDS = 5.0
"""Where no rank moves for so long, it may be a hang."""
ANSWER_SECONDS = 2.0
"""How long a rank that has been asked for its notes may take."""
LAST_WAIT_SECONDS = 5.0
"""How long a rank that has ended waits for the notes of the others."""
UNFINISHED = 8
"""So many events may still be written to, and so may each epoch."""
Report = Callable[[Run, Callable[[str], bool]], None]


class Exchange(threading.Thread):
    """Tells the others where this rank is, and reads what they tell.

    `report` is called on one rank: when all have taken their steps, when the
    job hangs, and in the end.
    """

    def __init__(
        self, recorder: Recorder, rank: int, timeout: float, report: Report
    ) -> None:
        super().__init__(daemon=True)
        self.recorder = recorder
        self.script_store: Any = dist.distributed_c10d._get_default_store()
        """Kept, as rank 0's may be the server of all."""
        self.store = self.script_store.clone()  # type: ignore[attr-defined]
        self.store.set_timeout(timedelta(seconds=LAST_WAIT_SECONDS))
        self.rank = rank
        self.ranks = recorder.ranks
        self.patience = min(PATIENCE_SECONDS, timeout / 3)
        self.report = report
        self.main_thread = threading.main_thread().ident
        self.is_over = threading.Event()
        self.published = 0
        self.resolved = 0
        self.position: list[Any] = []
        self.still_since = time.monotonic()
        self.beat()

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
        if self.wanted(0) > self.published:
            self.publish()
        self.beat()
        beats = self.beats()
        if self.hangs(beats) and self.is_first("hang"):
            self.report(self.gather(beats), self.is_first)
        are_over = bool(beats) and all(beat["has_watched"] for beat in beats)
        if self.rank == 0 and are_over and self.is_first("steps"):
            self.report(self.gather([]), self.is_first)

    def finish(self, has_failed: bool) -> None:
        """The script has ended here. The first that fails tells, or rank 0."""
        self.is_over.set()
        self.join(LAST_WAIT_SECONDS)
        told = self.key("told")
        try:
            tells = has_failed and self.is_first("end")
            self.publish()
            self.beat(is_done=True, has_failed=has_failed)
            if self.rank == 0 and not has_failed:
                self.wait_for(self.have_ended)
                tells = self.is_first("end")
            if tells:
                stuck = self.left_alone() if has_failed else []
                self.report(self.gather(stuck), self.is_first)
                self.store.set(told, "")
            elif self.rank == 0:
                self.wait_for(lambda: self.store.check([told]))
        except dist.DistError:
            pass  # the store has ended before us: another rank had the word
        except Exception as error:
            say(f"miniddp.check: gave up: {error!r}")

    def left_alone(self) -> list[Event]:
        """Where the ranks are, if a call here broke off as others had ended.

        A rank that leaves its group says a little later that it has ended.
        """
        place = self.recorder.broken_place
        if place.get("group") != "":
            return []
        self.wait_for(self.others_that_ended, ANSWER_SECONDS)
        ended = self.others_that_ended()
        if not ended or any(beat["has_failed"] for beat in ended):
            return []
        beats = self.beats()
        here = {"is_done": False, "place": place, "stack": [place["line"]]}
        beats[self.rank].update(here)
        return beats

    def others_that_ended(self) -> list[Event]:
        ended = [beat for beat in self.beats() if beat["is_done"]]
        return [beat for beat in ended if beat["rank"] != self.rank]

    def key(self, name: str, rank: int = 0) -> str:
        return f"miniddp.check/{name}/{rank}"

    def is_first(self, occasion: str) -> bool:
        return bool(self.store.add(self.key(occasion), 1) == 1)

    def wanted(self, more: int) -> int:
        return int(self.store.add(self.key("wanted"), more))

    def beat(self, is_done: bool = False, has_failed: bool = False) -> None:
        frame = sys._current_frames().get(self.main_thread or 0)
        stack = traceback.walk_stack(frame)
        position = [(inner.f_code, inner.f_lasti) for inner, _ in stack]
        if position != self.position:
            self.position = position
            self.still_since = time.monotonic()
        beat = {
            "rank": self.rank,
            "place": self.recorder.place,
            "still": time.monotonic() - self.still_since,
            "stack": [
                f"{line_of(outer)} in {outer.f_code.co_name}"
                for outer in user_frames(frame)
            ],
            "is_done": is_done,
            "has_failed": has_failed,
            "has_watched": is_done or not self.recorder.is_watching,
            "published": self.published,
        }
        self.store.set(self.key("beat", self.rank), json.dumps(beat))

    def beats(self) -> list[Event]:
        """Of all ranks, or empty as long as one has not begun."""
        keys = [self.key("beat", rank) for rank in self.ranks]
        if not self.store.check(keys):
            return []
        return [json.loads(text) for text in self.store.multi_get(keys)]

    def have_ended(self) -> bool:
        beats = self.beats()
        return bool(beats) and all(beat["is_done"] for beat in beats)

    def hangs(self, beats: list[Event]) -> bool:
        """No rank moves: they wait for different things, or for one gone."""
        running = [beat for beat in beats if not beat["is_done"]]
        if any(beat["still"] < self.patience for beat in running):
            return False
        if any(beat["place"].get("group") is None for beat in running):
            return False
        if len(running) < len(beats):
            return bool(running)
        return len({call(beat["place"]) for beat in running}) > 1

    def publish(self) -> None:
        number = self.wanted(0)
        copies = [dict(event) for event in list(self.recorder.events)]
        events = json.dumps(copies, default=plain)
        self.store.set(self.key("events", self.rank), events)
        self.published = number

    def gather(self, stuck: list[Event]) -> Run:
        """The notes of all ranks, of those that answer."""
        number = self.wanted(1)
        self.publish()
        self.wait_for(self.beats)
        self.wait_for(lambda: self.have_answered(number), ANSWER_SECONDS)
        events = []
        for rank in self.ranks:
            key = self.key("events", rank)
            is_there = self.store.check([key])
            events.append(json.loads(self.store.get(key)) if is_there else [])
        return Run(events, stuck)

    def have_answered(self, number: int) -> bool:
        others = [beat for beat in self.beats() if beat["rank"] != self.rank]
        return all(
            beat["is_done"] or beat["published"] >= number for beat in others
        )

    def wait_for(
        self, condition: Callable[[], Any], seconds: float = LAST_WAIT_SECONDS
    ) -> None:
        deadline = time.monotonic() + seconds
        while not condition() and time.monotonic() < deadline:
            time.sleep(TICK_SECONDS / 4)

    def resolve(self) -> None:
        """Make digests of samples, and numbers of tensors, for JSON."""
        events = self.recorder.events
        end = max(self.resolved, len(events) - UNFINISHED)
        for event in events[self.resolved : end]:
            if event["kind"] == "epoch":
                continue
            for key, value in list(event.items()):
                event[key] = plain(value)
        self.resolved = end


def plain(value: Any) -> Any:
    if isinstance(value, Sample | Rows):
        return value.resolve()
    if isinstance(value, list):
        return [plain(item) for item in value]
    return value.tolist() if isinstance(value, Tensor) else value
