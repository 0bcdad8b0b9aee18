"""The CUDA codec as zipccl_core.codec takes one: a tensor in, a tensor out, errors raised."""

from __future__ import annotations

import torch
from torch import Tensor

from ...codebook import Codebook
from ...frame import ALIGN_BYTES, FrameHeader
from .decode import decode_frames, read_header
from .encode import encode_frames
from .stats import measure


class CudaCodec:
    """What a device brings to zipccl_core.codec.

    encode and exponent_histogram never wait for the device; decode and read_header wait, since they raise. Buffers that
    do not begin at a multiple of 128 bytes are copied to or from one that does.
    """

    def encode(self, words: Tensor, codebook: Codebook, out: Tensor) -> None:
        aligned = out if out.data_ptr() % ALIGN_BYTES == 0 else torch.empty_like(out)
        encode_frames([words], [codebook], [aligned])
        if aligned is not out:
            out.copy_(aligned)

    def decode(self, frame: Tensor, out: Tensor) -> None:
        decode_frames([_aligned(frame)], [out]).check()

    def read_header(self, frame: Tensor) -> FrameHeader:
        return read_header(frame)

    def exponent_histogram(self, words: Tensor) -> Tensor:
        return measure([words]).histogram().clone()


def _aligned(frame: Tensor) -> Tensor:
    return frame if frame.data_ptr() % ALIGN_BYTES == 0 else frame.clone()
