"""Encode and decode on torch tensors: check the arguments, choose the codec by device.

The format is docs/FORMAT.md. `reference` obeys it line by line, `cpu` is vectorised, `cuda` runs on the device; all
give the same bytes.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from ..codebook import Codebook
from ..errors import InvalidArgument
from ..frame import FrameHeader, dtype_name, max_frame_bytes
from . import cpu

__all__ = ["decode", "encode", "exponent_histogram", "read_header"]


class _DeviceCodec(Protocol):
    """What a device brings. Arguments are contiguous, on that device and of a dtype we take; encode's out is enough.

    decode must still check n and dtype of `out` against the frame.
    """

    def encode(self, words: Tensor, codebook: Codebook, out: Tensor) -> None: ...

    def decode(self, frame: Tensor, out: Tensor) -> None: ...

    def read_header(self, frame: Tensor) -> FrameHeader: ...

    def exponent_histogram(self, words: Tensor) -> Tensor: ...


_TORCH_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def encode(words: Tensor, codebook: Codebook, *, out: Tensor | None = None) -> Tensor:
    """Encode bf16 words, or float32 elements, into one frame (FORMAT.md 3).

    Bit-exact for every pattern, NaN payloads and -0 included; words and codebook determine every byte. On the CPU done
    when it returns. On CUDA ordered after and before work on torch's current stream; never waits for the device.

    Args:
        words: [n] bfloat16 or float32, cpu or cuda, contiguous, at any storage offset; n may be 0. Another shape is
            taken in memory order.
        codebook: 7 distinct exponents.
        out: [max_frame_bytes(n, words.dtype)] uint8 or longer, same device, contiguous, not overlapping words;
            allocated if None.

    Returns:
        `out`, or [max_frame_bytes(n, words.dtype)] uint8. Only the first frame_bytes are the frame; see read_header.

    Raises:
        InvalidArgument: wrong dtype, device, layout or capacity.
    """
    codec = _codec_of("encode", "words", words)
    _check_layout("encode", "words", words)
    if not isinstance(codebook, Codebook):
        raise InvalidArgument(f"encode: codebook must be a Codebook, got {type(codebook).__name__}; see Codebook.given")
    capacity = max_frame_bytes(words.numel(), dtype_name(words.dtype))
    if out is None:
        out = torch.empty(capacity, dtype=torch.uint8, device=words.device)
    else:
        _check_buffer("encode", "out", out)
        if out.device != words.device:
            raise InvalidArgument(f"encode: out must be on {words.device} as words are, got {out.device}")
        if out.numel() < capacity:
            raise InvalidArgument(
                f"encode: out must hold max_frame_bytes({words.numel()}, {words.dtype}) = {capacity} bytes, "
                f"got {out.numel()}; allocate that many"
            )
    codec.encode(words.detach(), codebook, out)
    return out


def decode(frame: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Decode a frame into the elements it was made of (FORMAT.md 8), after checking all that can be checked.

    Done when it returns, on CUDA too: there it waits for the device's verdict, and `codec.cuda.decode.decode_frames`
    does not. Nothing outside `out` is ever written; when CorruptFrame is raised, part of `out` may have been written
    and is not to be used.

    Args:
        frame: [frame_bytes] uint8 or longer, cpu or cuda, contiguous, at any alignment; bytes beyond frame_bytes are
            ignored.
        out: [n] of the frame's dtype, same device, contiguous, not overlapping frame; another shape is filled in memory
            order. Allocated if None, with n and dtype from the header, which for a frame on a device is waited for.

    Returns:
        `out`, or [n] bfloat16 or float32 on the frame's device.

    Raises:
        TruncatedFrame: the buffer ends before the frame.
        UnsupportedFrame: a version, dtype or scheme that this build does not read.
        CorruptFrame: anything that no encoder writes.
        InvalidArgument: wrong dtype, device, layout or length of an argument.
    """
    codec = _codec_of("decode", "frame", frame)
    _check_buffer("decode", "frame", frame)
    if out is None:
        header = codec.read_header(frame)
        out = torch.empty(header.n_words, dtype=_TORCH_DTYPES[header.dtype], device=frame.device)
    else:
        _check_layout("decode", "out", out)
        if out.device != frame.device:
            raise InvalidArgument(f"decode: out must be on {frame.device} as the frame is, got {out.device}")
    codec.decode(frame, out.detach())
    return out


def read_header(frame: Tensor) -> FrameHeader:
    """Read and check the header of a frame (FORMAT.md 8.1–8.8); blocks and digest are left to decode.

    Args:
        frame: [frame_bytes] uint8 or longer, cpu or cuda (then the 128 bytes are waited for), contiguous.

    Raises:
        TruncatedFrame, UnsupportedFrame, CorruptFrame: as FORMAT.md 8 says.
        InvalidArgument: not a contiguous uint8 tensor.
    """
    codec = _codec_of("read_header", "frame", frame)
    _check_buffer("read_header", "frame", frame)
    return codec.read_header(frame)


def exponent_histogram(words: Tensor) -> Tensor:
    """Count the exponents of the sample that the law fixes (FORMAT.md 7.3): integers, the same in every run.

    `Codebook.fitted(exponent_histogram(words).tolist())` fits words.

    Args:
        words: [n] bfloat16 or float32, cpu or cuda, contiguous; n may be 0.

    Returns:
        [256] int64, same device; fewer than 2**17 in all.

    Raises:
        InvalidArgument: wrong dtype, device or layout.
    """
    codec = _codec_of("exponent_histogram", "words", words)
    _check_layout("exponent_histogram", "words", words)
    return codec.exponent_histogram(words.detach())


class _Cpu:
    """The CPU codec on tensors: their memory seen as patterns."""

    def encode(self, words: Tensor, codebook: Codebook, out: Tensor) -> None:
        cpu.encode_into(_patterns(words), codebook, out.numpy())

    def decode(self, frame: Tensor, out: Tensor) -> None:
        cpu.decode_into(frame.numpy(), _patterns(out))

    def read_header(self, frame: Tensor) -> FrameHeader:
        return cpu.read_header(frame.numpy())

    def exponent_histogram(self, words: Tensor) -> Tensor:
        return torch.from_numpy(cpu.exponent_histogram(_patterns(words)))


def _patterns(elements: Tensor) -> cpu.Elements:
    if elements.dtype == torch.bfloat16:
        return elements.view(-1).view(torch.int16).numpy().view(np.uint16)
    return elements.view(-1).view(torch.int32).numpy().view(np.uint32)


def _codec_of(what: str, name: str, tensor: Tensor) -> _DeviceCodec:
    if not isinstance(tensor, Tensor):
        raise InvalidArgument(f"{what}: {name} must be a torch tensor, got {type(tensor).__name__}")
    if tensor.device.type == "cpu":
        return _Cpu()
    if tensor.device.type == "cuda":  # the one place where zipccl_core/codec/cuda is plugged in
        from .cuda.tensors import CudaCodec

        return CudaCodec()
    raise InvalidArgument(f"{what}: {name} must be on cpu or cuda, got {tensor.device}")


def _check_layout(what: str, name: str, elements: Tensor) -> None:
    dtype_name(elements.dtype)
    if not elements.is_contiguous():
        raise InvalidArgument(
            f"{what}: {name} must be contiguous, got strides {elements.stride()} for shape {tuple(elements.shape)}; "
            f"call .contiguous() first"
        )


def _check_buffer(what: str, name: str, buffer: Tensor) -> None:
    if not isinstance(buffer, Tensor) or buffer.dtype != torch.uint8 or buffer.dim() != 1 or not buffer.is_contiguous():
        came = f"{buffer.dtype} of shape {tuple(buffer.shape)}" if isinstance(buffer, Tensor) else type(buffer).__name__
        raise InvalidArgument(f"{what}: {name} must be a contiguous uint8 vector, got {came}")
