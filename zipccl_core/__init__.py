"""Lossless compressed collectives for LLM training: the codec of docs/FORMAT.md and what is built on it."""

from .codebook import Codebook
from .codec import decode, encode, read_header
from .collectives import Communicator
from .errors import ZipcclError
from .frame import FORMAT_VERSION, FrameHeader, max_frame_bytes, static_bytes
from .policy import Policy

__all__ = [
    "FORMAT_VERSION",
    "Codebook",
    "Communicator",
    "FrameHeader",
    "Policy",
    "ZipcclError",
    "decode",
    "encode",
    "max_frame_bytes",
    "read_header",
    "static_bytes",
]
