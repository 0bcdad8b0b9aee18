"""When to compress: a pure function of what all ranks know."""

from .switch import Decision, Policy

__all__ = ["Decision", "Policy"]
