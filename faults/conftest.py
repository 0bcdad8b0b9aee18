"""Fixtures of the fault suite, and the nightly scenarios, which run with --nightly only."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from faults.lab import Lab


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--nightly", action="store_true", help="run the scenarios that are marked nightly too")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "nightly: a scenario that runs with --nightly only")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--nightly"):
        return
    left_out = [item for item in items if item.get_closest_marker("nightly")]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


@pytest.fixture(scope="session")
def lab() -> Iterator[Lab]:
    """A warm server for this process; with pytest-xdist, one a worker."""
    with Lab() as made:
        yield made
