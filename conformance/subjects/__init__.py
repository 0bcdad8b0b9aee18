"""The implementations that can be named with --subject, and how a name finds one."""

from __future__ import annotations

import importlib
from pathlib import Path

from conformance.subject import Capabilities, Subject

_HERE = Path(__file__).parent
_MEMBERS = ("name", "capabilities", "communicator", "codec")


def names() -> list[str]:
    """The plain names: modules of this folder that have a callable `subject`."""
    return sorted(p.stem for p in _HERE.glob("*.py") if p.stem != "__init__")


def check_name(name: str) -> str:
    """What is wrong with a --subject name as far as can be seen without importing it; "" if nothing."""
    if ":" in name or name.startswith("broken.") or name in names():
        return ""
    return f"--subject {name!r}: wanted one of {', '.join(names())}, broken.NAME, or module:attribute"


def check(name: str) -> str:
    """What is wrong with a --subject name, in a line; "" if nothing. One from elsewhere is imported and made for it.

    Those of this folder are not: what they import may take seconds, and the ranks will say what is wrong with it.
    """
    if problem := check_name(name):
        return problem
    if ":" not in name and not name.startswith("broken."):
        return ""
    try:
        if name.startswith("broken."):
            _found(name)
        else:
            load_subject(name)
    except (Exception, SystemExit) as e:
        text = " ".join(str(e).split()) or "no more is said"
        return text if text.startswith("--subject") else f"--subject {name!r}: {type(e).__name__}: {text}"
    return ""


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
    found = _found(name)
    subject = found if not callable(found) else found()
    missing = [member for member in _MEMBERS if getattr(subject, member, None) is None]
    if missing:
        raise TypeError(
            f"--subject {name!r} gave a {type(subject).__name__} without {', '.join(missing)}: wanted the members of "
            "conformance.subject.Subject"
        )
    assert isinstance(subject, Subject)
    if not isinstance(subject.capabilities, Capabilities):
        given = type(subject.capabilities).__name__
        raise TypeError(f"--subject {name!r}: capabilities: wanted a conformance.subject.Capabilities, got a {given}")
    return subject


def _found(name: str) -> object:
    """What a --subject name stands for: a Subject, or what makes one."""
    if name.startswith("broken."):
        from conformance.subjects.broken import BROKEN

        short = name.removeprefix("broken.")
        if short not in BROKEN:
            raise LookupError(f"--subject {name!r}: no such planted defect; there are {', '.join(sorted(BROKEN))}")
        return BROKEN[short].subject_factory
    module, _, attribute = name.partition(":") if ":" in name else (f"conformance.subjects.{name}", "", "subject")
    found: object = importlib.import_module(module)
    for part in attribute.split("."):
        found = getattr(found, part)
    return found
