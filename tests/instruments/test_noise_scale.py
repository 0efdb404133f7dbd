"""The critical batch size, found from steps."""

import pytest

from instruments.noise_scale import fit_steps


def test_the_curve_that_made_the_steps_is_found() -> None:
    batches = [8, 16, 64, 512]
    curve = fit_steps(batches, [40.0 * (1 + 100.0 / batch) for batch in batches])
    assert curve == pytest.approx((40.0, 100.0), rel=1e-3)


def test_steps_are_whole_numbers() -> None:
    assert fit_steps([8, 80], [110, 20]) == pytest.approx((10.0, 80.0), rel=1e-3)
