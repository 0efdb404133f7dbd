import pytest
from hypothesis import given
from hypothesis import strategies as st

from instruments.restarts import lost_share, save_interval


@given(save=st.floats(1, 600), failure=st.floats(10_000, 1e7), other=st.floats(0.05, 20))
def test_no_other_interval_loses_less(save, failure, other):
    best = save_interval(save, failure)
    least = lost_share(best, save, failure)
    assert least <= lost_share(other * best, save, failure) * (1 + 1e-9)


def test_an_example_by_hand():
    assert save_interval(30, 540_000) == pytest.approx(5692, abs=1)
    assert lost_share(3600, 36, 360_000) == pytest.approx(0.01 + 0.005)


def test_a_negative_amount_is_named():
    with pytest.raises(ValueError, match="save_seconds"):
        save_interval(-1, 100)
