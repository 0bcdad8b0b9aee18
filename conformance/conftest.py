"""Makes plain `pytest conformance/` work: registers conformance.plugin before options are parsed."""

from __future__ import annotations

import pytest

from conformance import plugin


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    if not pluginmanager.is_registered(plugin):
        pluginmanager.register(plugin, "conformance.plugin")
