"""Lossless compressed collectives for LLM training: the codec of docs/FORMAT.md and what is built on it."""

from .codebook import Codebook
from .codec import decode, encode, read_header
from .errors import ZipcclError
from .frame import FORMAT_VERSION, FrameHeader, max_frame_bytes, static_bytes

__all__ = [
    "FORMAT_VERSION",
    "Codebook",
    "FrameHeader",
    "ZipcclError",
    "decode",
    "encode",
    "max_frame_bytes",
    "read_header",
    "static_bytes",
]
