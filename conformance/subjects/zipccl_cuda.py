"""Our CUDA codec as the judge sees it, alone and crossed with our CPU codec. No communicator: the codec suites only.

pytest conformance/test_reject.py --subject zipccl_cuda --world-size 1
pytest conformance/test_reject.py --subject conformance.subjects.zipccl_cuda:cuda_to_cpu --world-size 1
"""

from __future__ import annotations

import torch
import torch.distributed as dist

import zipccl_core
from conformance.subject import Capabilities, Communicator
from zipccl_core import Codebook


class DeviceCodec:
    """zipccl_core's encode on one device and decode on another; tensors come and go on the CPU.

    Args:
        encoder, decoder: "cpu" or "cuda".
    """

    def __init__(self, encoder: str, decoder: str) -> None:
        self.encoder, self.decoder = encoder, decoder

    def encode(self, words: torch.Tensor, codebook_exponents: tuple[int, ...]) -> torch.Tensor:
        buffer = zipccl_core.encode(words.to(self.encoder), Codebook.given(codebook_exponents))
        return buffer[: zipccl_core.read_header(buffer).frame_bytes].cpu()

    def decode(self, frame: torch.Tensor) -> torch.Tensor:
        return zipccl_core.decode(frame.to(self.decoder)).cpu()


class CudaSubject:
    """A codec that needs a CUDA device: without one, making it is an error."""

    def __init__(self, name: str, encoder: str, decoder: str) -> None:
        if not torch.cuda.is_available():
            raise RuntimeError(f"subject {name} needs a CUDA device and found none")
        self.name = name
        self._codec = DeviceCodec(encoder, decoder)
        self.capabilities = Capabilities(
            operations=frozenset(),
            dtypes=frozenset({"bfloat16", "float32"}),
            coded_dtypes=frozenset({"bfloat16", "float32"}),
            reduce_ops=frozenset(),
            codec=True,
            versions={"frame format": str(zipccl_core.FORMAT_VERSION), "GPU": torch.cuda.get_device_name()},
        )

    def communicator(self, group: dist.ProcessGroup, *, mode: str = "", timeout_s: float = 20.0) -> Communicator:
        raise NotImplementedError("this subject is a codec alone")

    def codec(self) -> DeviceCodec:
        return self._codec


def subject() -> CudaSubject:
    """CUDA encodes and decodes."""
    return CudaSubject("zipccl_cuda", "cuda", "cuda")


def cuda_to_cpu() -> CudaSubject:
    """CUDA encodes, the CPU decodes."""
    return CudaSubject("zipccl_cuda_to_cpu", "cuda", "cpu")


def cpu_to_cuda() -> CudaSubject:
    """The CPU encodes, CUDA decodes."""
    return CudaSubject("zipccl_cpu_to_cuda", "cpu", "cuda")
