"""Tests of the judge itself. They run in the pytest that a person started: `pytest conformance/meta`."""
