"""Clocks of `instruments`: how long a rank waits for gradients when its own are complete."""

from instruments import clock
from instruments.clock import SyncClock
from tests.miniddp.training_cases import build_regression, regression


def test_waiting_begins_with_the_last_gradient_of_all_micro_batches(monkeypatch):
    module = build_regression()
    module.layers[0].bias.requires_grad_(False)
    times = iter(float(second) for second in range(100))
    monkeypatch.setattr(clock, "now", lambda: next(times))
    sync_clock = SyncClock(module)
    for _ in range(2):
        module(**regression(range(8))).loss.backward()
    assert next(times) == 6, "three gradients, twice"
    assert sync_clock.seconds() == 2, "from 5 to 7"
