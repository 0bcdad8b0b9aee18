"""What a caller gives, looked at and made simple: flat tensors that any thread may read and write."""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import InvalidArgument
from .call import nothing
from .repeat import UNREPEATABLE, is_plain

_OPS = {id(op): name for name, op in vars(dist.ReduceOp).items() if type(op) is dist.ReduceOp.RedOpType}


def hashable(op: Any) -> Any:
    """What to remember a ReduceOp by: of torch's own, which live for ever, the name, since they are slow to hash."""
    return _OPS.get(id(op), UNREPEATABLE)


def check_async_op(async_op: object) -> None:
    """InvalidArgument if it is neither True nor False."""
    if not isinstance(async_op, bool):  # torch has `group` before it
        raise InvalidArgument(f"async_op must be True or False, got {async_op!r}; the group is the Communicator's own")


def check_tensor(name: str, tensor: object) -> None:
    """InvalidArgument if it is no tensor that has its elements in memory, one by one, on cpu or cuda."""
    if not isinstance(tensor, Tensor):
        raise InvalidArgument(f"{name} must be a tensor, got {type(tensor).__name__}")
    kind = type(tensor)
    if kind.__torch_dispatch__ is not Tensor.__torch_dispatch__:
        raise InvalidArgument(
            f"{name} must hold its elements itself, got {kind.__name__}; give what it stands for, such as .to_local() "
            "of a DTensor, or .wait() of an AsyncCollectiveTensor"
        )
    if tensor.is_nested or tensor.is_quantized:
        what, instead = ("nested", ".values()") if tensor.is_nested else ("quantized", ".int_repr()")
        raise InvalidArgument(f"{name} must not be {what}; give its {instead}")
    if tensor.device.type not in ("cpu", "cuda") or tensor.layout != torch.strided:
        raise InvalidArgument(f"{name} must be a strided tensor on cpu or cuda, got {tensor.layout} on {tensor.device}")
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor) or torch._is_functional_tensor(tensor):
        raise InvalidArgument(f"{name} must have memory of its own, and tensors within torch.func do not")
    if not _can_be_copied(tensor.dtype):
        raise InvalidArgument(
            f"{name} must be of a dtype whose elements torch copies, got {tensor.dtype}; view it as bytes"
        )
    if tensor._is_zerotensor() or _span(tensor)[1] > _end(tensor):
        raise InvalidArgument(f"{name} must have memory for all its {tensor.numel()} elements; its storage is smaller")


@functools.cache
def _can_be_copied(dtype: torch.dtype) -> bool:
    try:
        torch.empty(1, dtype=dtype, device="cpu").clone()
    except (RuntimeError, NotImplementedError):
        return False
    return True


def _end(tensor: Tensor) -> int:
    storage = tensor.untyped_storage()
    return storage.data_ptr() + storage.nbytes()


def _span(tensor: Tensor) -> tuple[int, int]:
    """The addresses from the first byte of its elements to behind the last."""
    if tensor.numel() == 0:
        return 0, 0
    furthest = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    begin = tensor.untyped_storage().data_ptr() + int(tensor.storage_offset()) * tensor.element_size()
    return begin, begin + (furthest + 1) * tensor.element_size()


def check_modes() -> None:
    """InvalidArgument if torch's operations give something else than words now."""
    if torch._C._len_torch_dispatch_stack() and type(torch.empty(0, device="cpu")) is not Tensor:
        raise InvalidArgument("not within a mode in which torch's tensors hold no words, such as FakeTensorMode")
    if torch._C._get_tracing_state() is not None:
        raise InvalidArgument("not within torch.jit.trace: what is sent would not be recorded")


def bare(tensor: Tensor) -> Tensor:
    """The same memory as a tensor of torch's own class, in no graph, that may be written in any mode of autograd's."""
    if type(tensor) is not Tensor:
        with torch._C.DisableTorchFunctionSubclass():
            tensor = tensor.as_subclass(Tensor)
    if not tensor.is_inference():
        return tensor.detach()
    made = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    made = made.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())
    made = made.conj() if tensor.is_conj() else made
    return torch._neg_view(made) if tensor.is_neg() else made


_AS_IT_IS = contextlib.nullcontext()


def no_inference() -> contextlib.AbstractContextManager[object]:
    """Within, what is made is no inference tensor: another thread could not write it."""
    return torch.inference_mode(False) if torch.is_inference_mode_enabled() else _AS_IT_IS


def bytes_of(tensor: Tensor) -> int:
    """Of its elements."""
    return tensor.numel() * tensor.element_size()


def flat_input(input: Tensor, *outputs: Tensor) -> Tensor:
    """The input in logical order, as it is now: a copy if it is strided or shares memory with an output."""
    flat = input.resolve_conj().resolve_neg().contiguous().reshape(-1)
    return flat.clone() if any(_overlap(flat, output) for output in outputs) else flat


def _overlap(a: Tensor, b: Tensor) -> bool:
    """Whether their memory does, whatever storages it counts to: numpy and DLPack make others of it."""
    (begin_a, end_a), (begin_b, end_b) = _span(a), _span(b)
    return begin_a < end_b and begin_b < end_a and a.device == b.device


def flat_output(output: Tensor) -> tuple[Tensor, Callable[[], None]]:
    """A flat tensor to fill, and what brings it into a strided output afterwards."""
    if is_plain(output):
        return output.reshape(-1), nothing
    flat = torch.empty(output.numel(), dtype=output.dtype, device=output.device)
    return flat, lambda: _scatter_back(output, flat)


def _scatter_back(output: Tensor, flat: Tensor) -> None:
    output.copy_(flat.reshape(output.shape))


def flat_outputs(outputs: Sequence[Tensor]) -> tuple[list[Tensor], Callable[[], None]]:
    """Flat tensors to fill, and what brings them into those of the outputs that are strided."""
    flats, backs = zip(*map(flat_output, outputs), strict=True)

    def finish() -> None:
        for back in backs:
            back()

    return list(flats), finish


def are_given(sizes: Any) -> bool:
    """Whether split sizes are, of whatever type; None and an empty list are none."""
    return not (sizes is None or (isinstance(sizes, (list, tuple)) and not sizes))


def split(flat: Tensor, tensor: Tensor, sizes: Any, world_size: int, name: str) -> list[Tensor]:
    """One flat part a rank.

    Args:
        flat: the elements of `tensor`.
        sizes: rows of each part; equal parts if not are_given.
    """
    rows = tensor.shape[0] if tensor.dim() else 1
    if not are_given(sizes):
        if rows % world_size:
            raise InvalidArgument(f"{name}: {rows} rows do not divide by {world_size} ranks; give {name}_split_sizes")
        sizes = [rows // world_size] * world_size
    try:
        sizes = [operator.index(size) for size in sizes]
    except TypeError as exc:
        raise InvalidArgument(f"{name}_split_sizes must be whole numbers, got {sizes!r}") from exc
    if len(sizes) != world_size or min(sizes) < 0 or sum(sizes) != rows:
        raise InvalidArgument(
            f"{name}_split_sizes must be {world_size} sizes, none negative, adding up to {rows} rows; got {sizes}"
        )
    row_words = flat.numel() // rows if rows else 0
    return list(torch.split(flat, [size * row_words for size in sizes]))
