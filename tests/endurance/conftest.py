"""The order of all tests: the files that take longest begin first, else one of them ends alone."""

import pytest

LONGEST = (
    "test_pages",
    "test_commands",
    "test_faults",
    "test_cluster",
    "test_preemptible",
    "test_stage_9",
    "test_ddp",
    "test_soak",
    "test_stages",
    "test_wrong_solutions",
    "test_interactive",
    "test_train",
    "test_data_parallel",
    "test_lighthouse",  # may wait for npm
    "test_firefox",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    places = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path.stem, len(places)))
