"""Bring CUDA's compilers where there are none: `python -m zipccl_core.tests.need_nvcc`, before the tests that compile.

Kernels must compile without a GPU, on any machine. Where no nvcc or NVRTC is installed, NVIDIA's wheels are, of the
versions in constraints.txt. NVRTC and the runtime's headers are pinned here and not there: torch's CUDA builds bring
their own.
"""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from pathlib import Path

from zipccl_core.codec.cuda.jit import CompilerError, compile_kernels, nvcc_path

CONSTRAINTS = Path(__file__).parents[2] / "constraints.txt"
WHEELS = ("nvidia-cuda-nvcc", "nvidia-cuda-crt", "nvidia-nvvm")
RUNTIME = "nvidia-cuda-runtime"
RUNTIME_VERSION = "13.0.96"
NVRTC = "nvidia-cuda-nvrtc==13.0.88"


def has(distribution: str) -> bool:
    """Whether a distribution is installed."""
    try:
        importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def nvrtc_works() -> bool:
    """Whether NVRTC is here, which compiles where there is no nvcc."""
    try:
        print(compile_kernels("stats", "sm_90", compiler="nvrtc").compiler)
    except CompilerError:
        return False
    return True


def install(wheels: list[str]) -> None:
    """Install wheels, of the versions in constraints.txt."""
    print(f"installing {', '.join(wheels)}")
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", "-c", str(CONSTRAINTS), *wheels], check=True)


def main() -> int:
    """Install the wheels of what is missing; 0 if both compilers are there afterwards."""
    if not nvcc_path():
        install([*WHEELS, *([] if has(RUNTIME) else [f"{RUNTIME}=={RUNTIME_VERSION}"])])
    found = nvcc_path()
    print(f"nvcc: {found or 'still none; install the CUDA toolkit and put nvcc on PATH'}")
    if not nvrtc_works():
        install([NVRTC])
    return 0 if found and nvrtc_works() else 1


if __name__ == "__main__":
    sys.exit(main())
