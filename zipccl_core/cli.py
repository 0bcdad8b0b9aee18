"""The command line: `zipccl doctor`, `zipccl bench`; also as `python -m zipccl_core.cli`."""

from __future__ import annotations

import argparse
import importlib.util
import os
import platform
import sys
from collections.abc import Sequence

import torch

from . import bench
from .codec.cuda import jit
from .errors import InvalidArgument, ZipcclError
from .frame import FORMAT_VERSION

__all__ = ["main"]


def doctor(warm: bool, architectures: Sequence[str]) -> list[str]:
    """What this machine has for zipccl, a line a fact; with `warm`, compiles the kernels into the cache first.

    Args:
        warm: compile; no rank then compiles while others wait for it.
        architectures: "sm_90" and the like; those of the visible devices if empty.

    Raises:
        InvalidArgument: `warm`, no architectures, and no device; or architectures without `warm`.
        CompilerError: a kernel does not compile, or there is no compiler.
    """
    if architectures and not warm:
        raise InvalidArgument(f"--arch is for --warm: give --warm too, or leave out --arch {architectures[0]}")
    if warm and not architectures and not torch.cuda.device_count():
        raise InvalidArgument(
            f"--warm: no GPU is visible; say for which, as in --arch {' --arch '.join(jit.ARCHITECTURES)}"
        )
    lines = jit.warm(architectures or None) if warm else []
    lines += [
        f"python {platform.python_version()}, torch {torch.__version__}, frame format {FORMAT_VERSION}",
        f"PyCUDA: {'here' if importlib.util.find_spec('pycuda') else 'missing: tensors on CUDA cannot be coded'}",
        f"compiler: {jit.nvcc_path() or 'no nvcc; NVRTC is tried'}",
        f"cache: {jit.cache_dir()}",
    ]
    for i in range(torch.cuda.device_count()):
        major, minor = torch.cuda.get_device_capability(i)
        lines.append(f"device {i}: {torch.cuda.get_device_name(i)}, sm_{major}{minor}")
    if not torch.cuda.device_count():
        lines.append("no CUDA device: the CPU codec works")
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; its exit status. Errors are one line on stderr and status 1.

    An error of ours is the same on all ranks, so only rank 0 prints it; any other is printed where it happens.
    """
    parser = argparse.ArgumentParser(prog="zipccl", description="Lossless compressed collectives: tools.")
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("doctor", help="say what this machine has, and compile ahead")
    command.add_argument("--warm", action="store_true", help="compile all kernels into the cache")
    command.add_argument(
        "--arch",
        action="append",
        default=[],
        metavar="SM",
        help="of --warm: for this architecture, e.g. sm_90; may be repeated",
    )
    command = commands.add_parser("bench", help="time and check the collectives over a sweep of sizes, under torchrun")
    bench.add_arguments(command)
    options = parser.parse_args(arguments)
    rank = os.environ.get("RANK", "0")
    try:
        if options.command == "bench":
            return bench.run(options)
        print("\n".join(doctor(options.warm, options.arch)))
    except ZipcclError as error:
        if rank == "0":
            print(f"zipccl {options.command}: {error}", file=sys.stderr)
        return 1
    except (RuntimeError, OSError) as error:
        text = (str(error).splitlines() or [""])[0]
        print(f"zipccl {options.command}: rank {rank}: {type(error).__name__}: {text}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
