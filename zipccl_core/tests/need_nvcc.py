"""Bring a CUDA compiler where there is none: `python -m zipccl_core.tests.need_nvcc`, before the tests that compile.

Kernels must compile without a GPU, on any machine. Where no nvcc is installed, NVIDIA's compiler wheels are, of the
versions in constraints.txt. The runtime's headers are pinned here and not there: torch's CUDA builds bring their own.
"""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from pathlib import Path

from zipccl_core.codec.cuda.jit import nvcc_path

CONSTRAINTS = Path(__file__).parents[2] / "constraints.txt"
WHEELS = ("nvidia-cuda-nvcc", "nvidia-cuda-crt", "nvidia-nvvm")
RUNTIME = "nvidia-cuda-runtime"
RUNTIME_VERSION = "13.0.96"


def has(distribution: str) -> bool:
    """Whether a distribution is installed."""
    try:
        importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def main() -> int:
    """Install the wheels if there is no nvcc; 0 if there is one afterwards."""
    if found := nvcc_path():
        print(f"nvcc: {found}")
        return 0
    wheels = [*WHEELS, *([] if has(RUNTIME) else [f"{RUNTIME}=={RUNTIME_VERSION}"])]
    print(f"no nvcc here: installing {', '.join(wheels)}")
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", "-c", str(CONSTRAINTS), *wheels], check=True)
    found = nvcc_path()
    print(f"nvcc: {found or 'still none; install the CUDA toolkit and put nvcc on PATH'}")
    return 0 if found else 1


if __name__ == "__main__":
    sys.exit(main())
