"""The kinds of error. Every one says what was wanted, what came, where, and what to do next."""

from __future__ import annotations

__all__ = [
    "CorruptFrame",
    "InvalidArgument",
    "PeerError",
    "RankTimeout",
    "TruncatedFrame",
    "UnsupportedFrame",
    "ZipcclError",
    "again",
]


class ZipcclError(Exception):
    """Base of every error zipccl raises on purpose."""


class InvalidArgument(ZipcclError, ValueError):
    """A caller passed something wrong: dtype, device, layout, size, policy."""


class UnsupportedFrame(ZipcclError):
    """A frame of a version, dtype or scheme that this build does not read."""


class CorruptFrame(ZipcclError):
    """A frame that no encoder writes: damaged on the way, or not a frame at all."""


class TruncatedFrame(ZipcclError):
    """A buffer that ends before its frame does."""


class PeerError(ZipcclError):
    """Another rank disagrees, failed, or is gone; the text names it."""


class RankTimeout(ZipcclError):
    """A rank did not arrive within the deadline; the text names it."""


def again(error: ZipcclError) -> ZipcclError:
    """A fresh error of the same kind and text: an exception object must not be raised in two threads."""
    return type(error)(*error.args)
