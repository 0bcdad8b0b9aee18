"""The implementations that can be named with --subject, and how a name finds one."""

from __future__ import annotations

import importlib
from pathlib import Path

from conformance.subject import Subject

_HERE = Path(__file__).parent


def names() -> list[str]:
    """The plain names: modules of this folder that have a callable `subject`."""
    return sorted(p.stem for p in _HERE.glob("*.py") if p.stem != "__init__")


def check_name(name: str) -> str:
    """What is wrong with a --subject name as far as can be seen without importing it; "" if nothing."""
    if ":" in name or name.startswith("broken.") or name in names():
        return ""
    return f"--subject {name!r}: wanted one of {', '.join(names())}, broken.NAME, or module:attribute"


def load_subject(name: str) -> Subject:
    """The subject of a --subject name.

    Args:
        name: "zipccl", "torch_native", …: a module of this folder with a callable `subject`; "broken.NAME": a planted
            defect; "module:attribute": a Subject, or a callable that returns one.

    Raises:
        LookupError: no such name.
        TypeError: what was found is not a Subject.
    """
    if problem := check_name(name):
        raise LookupError(problem)
    if name.startswith("broken."):
        from conformance.subjects.broken import BROKEN

        short = name.removeprefix("broken.")
        if short not in BROKEN:
            raise LookupError(f"--subject {name!r}: no such planted defect; there are {', '.join(sorted(BROKEN))}")
        found: object = BROKEN[short].subject_factory
    else:
        module, _, attribute = name.partition(":") if ":" in name else (f"conformance.subjects.{name}", "", "subject")
        found = importlib.import_module(module)
        for part in attribute.split("."):
            found = getattr(found, part)
    subject = found if not callable(found) else found()
    if not isinstance(subject, Subject):
        raise TypeError(f"--subject {name!r} gave a {type(subject).__name__}, which has not the members of a Subject")
    return subject
