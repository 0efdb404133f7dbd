"""The critical batch size, found from steps."""

import pytest

from instruments.noise_scale import fit_steps


def test_the_curve_that_made_the_steps_is_found() -> None:
    batches = [8, 16, 64, 512]
    curve = fit_steps(batches, [40.0 * (1 + 100.0 / batch) for batch in batches])
    assert curve == pytest.approx((40.0, 100.0), rel=1e-3)
