"""Planted defects: subjects that are wrong on purpose, and the one test that must catch each (conformance/meta).

To add one, write a module here and register a `Defect` in BROKEN. Factories import what they need when they are called,
so that this module costs nothing and needs no product.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass

from conformance.subject import Subject


@dataclass(frozen=True)
class Defect:
    """One planted defect.

    Attributes:
        subject_factory: makes the broken subject.
        caught_by: node id of the test that must FAIL with it (and passes without it); `[...]` may be left out, then
            every case of the test runs and at least one must FAIL.
        what: the defect in one sentence.
        ranks: world size it is run with.
        like: the sound subject that must pass the same test.
    """

    subject_factory: Callable[[], Subject]
    caught_by: str
    what: str
    ranks: int = 2
    like: str = "zipccl"


def _lazy(target: str) -> Callable[[], Subject]:
    """A factory that imports `module:attribute` of this folder when called, and calls it."""
    module, attribute = target.split(":")

    def make() -> Subject:
        subject: Subject = getattr(importlib.import_module(f"{__name__}.{module}"), attribute)()
        return subject

    return make


BROKEN: dict[str, Defect] = {}
