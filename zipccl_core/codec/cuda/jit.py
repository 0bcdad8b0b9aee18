"""Compile, load and launch the kernels: compilers, the cache, contexts, streams and job tables.

The sole importer of PyCUDA, and only when something is launched. `compile_kernels` imports neither PyCUDA nor a driver,
so that a machine without a GPU can compile for every architecture.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import importlib
import os
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ...codebook import HISTOGRAM_DEPTH, SAMPLE_LOG2_WORDS, UPPER_RUN_FROM_SQUARED_1024
from ...errors import InvalidArgument, ZipcclError
from ...frame import (
    ALIGN_BYTES,
    BLOCK_WORDS,
    DIRECTORY_ENTRY_BYTES,
    DTYPES,
    ELEMENT_BYTES,
    FORMAT_VERSION,
    HEADER_BYTES,
    LOW_HALVES_BIT,
    MAGIC,
    OFFSET_MASK,
    PLANES,
    RESERVED_DIRECTORY_BITS,
    SCHEME_FAST,
    STORED_BIT,
    dtype_name,
    n_blocks,
    record_bytes,
    spill_bytes,
)

__all__ = [
    "ARCHITECTURES",
    "STEMS",
    "Compiled",
    "CompilerError",
    "Device",
    "Job",
    "Lane",
    "Launch",
    "Place",
    "Start",
    "Usage",
    "compile_kernels",
    "default_lane",
    "lend_lanes",
    "start",
    "take_back_lanes",
    "warm",
]

ARCHITECTURES = ("sm_80", "sm_86", "sm_90", "sm_100")
STEMS = ("encode", "decode", "decode_reduce", "stats")
SOURCES = Path(__file__).parent
STREAMS_A_DEVICE = 4

# Thread blocks of 288 that must fit a multiprocessor, for bfloat16 and float32: more hide more latency, and leave each
# thread fewer registers. sm_90 is measured (docs/PERFORMANCE.md); on the others, what fits without a spill.
RESIDENT_BLOCKS = {
    "sm_90": {"ENCODE": (3, 2), "DECODE": (3, 2), "REDUCE": (3, 1)},
    "": {"ENCODE": (2, 2), "DECODE": (2, 2), "REDUCE": (2, 1)},
    "sm_100": {"ENCODE": (2, 1), "DECODE": (2, 1), "REDUCE": (1, 1)},
}
# Tiles of shared memory a thread block: one is worked on, the others are being loaded.
STAGES = {"ENCODE": 2, "DECODE": 2, "REDUCE": 2}

# Multiprocessors that a launch leaves free if it is to share the device: a communication kernel, which is short of work
# and long in time, would else be put together on a few, and be slowed down for all of its time.
LEFT_FREE = 20

BLOCK_THREADS = 288
JOB_BYTES = 64
INLINE_JOBS = 16
VERDICT_BYTES = 192
COUNTERS_BYTES = 1088
STATISTICS_BYTES = 2112
SLOT_BYTES = BLOCK_WORDS  # of a tile's escapes in scratch: every word may be one
MAX_TILES = 1 << 31


class CompilerError(ZipcclError):
    """A kernel did not compile, or there is nothing to compile it with; the text has the command and its log."""


def resident_blocks(arch: str, kind: str, element_bytes: int) -> int:
    """Thread blocks of a kernel that fit a multiprocessor by registers; kind as in RESIDENT_BLOCKS."""
    return RESIDENT_BLOCKS.get(arch, RESIDENT_BLOCKS[""])[kind][element_bytes == 4]


def defines(arch: str) -> dict[str, str]:
    """The -D flags: every constant that the kernels share with frame.py and the launchers."""
    numbers = {
        "BLOCK_WORDS": BLOCK_WORDS,
        "HEADER_BYTES": HEADER_BYTES,
        "ALIGN_BYTES": ALIGN_BYTES,
        "DIRECTORY_ENTRY_BYTES": DIRECTORY_ENTRY_BYTES,
        "PLANES": PLANES,
        "RECORD_BYTES": record_bytes(BLOCK_WORDS),
        "SPILL_BYTES": spill_bytes(BLOCK_WORDS),
        "SLOT_BYTES": SLOT_BYTES,
        "SAMPLE_LOG2_WORDS": SAMPLE_LOG2_WORDS,
        "HISTOGRAM_DEPTH": HISTOGRAM_DEPTH,
        "UPPER_RUN_FROM_SQUARED_1024": UPPER_RUN_FROM_SQUARED_1024,
        "OFFSET_MASK": OFFSET_MASK,
        "STORED_BIT": STORED_BIT,
        "LOW_HALVES_BIT": LOW_HALVES_BIT,
        "RESERVED_DIRECTORY_BITS": RESERVED_DIRECTORY_BITS,
        "MAGIC": int.from_bytes(MAGIC, "little"),
        "FORMAT_VERSION": FORMAT_VERSION,
        "SCHEME_FAST": SCHEME_FAST,
        "DTYPE_BFLOAT16": DTYPES["bfloat16"],
        "DTYPE_FLOAT32": DTYPES["float32"],
        "BLOCK_THREADS": BLOCK_THREADS,
        "JOB_BYTES": JOB_BYTES,
        "INLINE_JOBS": INLINE_JOBS,
        "VERDICT_BYTES": VERDICT_BYTES,
        "COUNTERS_BYTES": COUNTERS_BYTES,
        "STATISTICS_BYTES": STATISTICS_BYTES,
    }
    suffix = {True: "ull", False: "u"}
    out = {f"ZIPCCL_{name}": f"{value}{suffix[value >= 1 << 32]}" for name, value in numbers.items()}
    for kind in RESIDENT_BLOCKS[""]:
        for element_bytes in (2, 4):
            out[f"ZIPCCL_{kind}_BLOCKS_{element_bytes}"] = str(resident_blocks(arch, kind, element_bytes))
    out.update({f"ZIPCCL_{kind}_STAGES": str(stages) for kind, stages in STAGES.items()})
    return out


# --- Compiling --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Usage:
    """What ptxas says about one kernel.

    Attributes:
        registers: a thread.
        stack_bytes, spill_store_bytes, spill_load_bytes: local memory a thread; all 0 in a kernel as it should be.
    """

    registers: int
    stack_bytes: int
    spill_store_bytes: int
    spill_load_bytes: int


@dataclass(frozen=True)
class Compiled:
    """Machine code of one .cu for one architecture.

    Attributes:
        cubin: for pycuda.driver.module_from_buffer.
        usage: by kernel name.
        compiler: what compiled it, with its version.
        command: what was run, as a line to read.
    """

    cubin: bytes
    usage: dict[str, Usage]
    compiler: str
    command: str


def source_files(stem: str) -> list[Path]:
    """The .cu of a stem and every header, in one order."""
    return [SOURCES / f"{stem}.cu", *sorted(SOURCES.glob("*.cuh"))]


def entry_points(stem: str) -> list[str]:
    """The names of the kernels of a .cu."""
    text = source_files(stem)[0].read_text(encoding="utf-8")
    return re.findall(r"^\s*(\w+_kernel)\(const __grid_constant__", text, re.MULTILINE)


def _flags(arch: str) -> list[str]:
    # -fmad=false: the sum contracts nothing. The device code has no other float arithmetic that matters.
    flags = ["-arch=" + arch, "-std=c++17", "-fmad=false", f"-I{SOURCES}"]
    return flags + [f"-D{name}={value}" for name, value in sorted(defines(arch).items())]


def nvcc_path() -> str | None:
    """nvcc: of PATH, of CUDA_HOME, of the usual place, or of NVIDIA's compiler wheel."""
    candidates = [shutil.which("nvcc")]
    for home in (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"):
        candidates.append(str(Path(home) / "bin" / "nvcc") if home else None)
    for entry in sys.path:
        candidates.append(str(Path(entry or ".") / "nvidia" / "cu13" / "bin" / "nvcc"))
    return next((c for c in candidates if c and os.access(c, os.X_OK)), None)


def compile_kernels(stem: str, arch: str, *, compiler: str = "auto") -> Compiled:
    """Compile one .cu with nvcc or, without it, with NVRTC. Needs no GPU, no driver and no PyCUDA.

    Args:
        stem: of STEMS.
        arch: "sm_80", "sm_90" …; ARCHITECTURES are the ones that are tested.
        compiler: "nvcc", "nvrtc", or "auto" for the first of them that is there.

    Raises:
        InvalidArgument: no such stem or compiler.
        CompilerError: no compiler, or it refused; the text has its command and log.
    """
    if stem not in STEMS or compiler not in ("auto", "nvcc", "nvrtc"):
        raise InvalidArgument(
            f"compile_kernels: stem must be one of {STEMS} and compiler auto, nvcc or nvrtc, got {stem!r}, {compiler!r}"
        )
    nvcc = nvcc_path() if compiler != "nvrtc" else None
    if nvcc:
        return _compile_nvcc(nvcc, stem, arch)
    if compiler == "nvcc":
        raise CompilerError(
            "compile_kernels: no nvcc on PATH, in CUDA_HOME, in /usr/local/cuda or in a wheel; "
            "pip install nvidia-cuda-nvcc, or let NVRTC compile"
        )
    return _compile_nvrtc(stem, arch)


def _compile_nvcc(nvcc: str, stem: str, arch: str) -> Compiled:
    with tempfile.TemporaryDirectory(prefix="zipccl-") as folder:
        cubin = Path(folder) / f"{stem}.cubin"
        # -Werror all-warnings: a warning here is a defect there
        command = [nvcc, "-cubin", "-Xptxas", "-v", "-Werror", "all-warnings", *_flags(arch)]
        command += ["-o", str(cubin), str(SOURCES / f"{stem}.cu")]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        log = done.stdout + done.stderr
        if done.returncode or not cubin.exists():
            raise CompilerError(f"compile_kernels: {stem}.cu for {arch} failed.\n{' '.join(command)}\n{log}")
        return Compiled(cubin.read_bytes(), _parse_usage(log), _nvcc_version(nvcc), " ".join(command))


@functools.cache
def _nvcc_version(nvcc: str) -> str:
    text = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True).stdout
    found = re.search(r"V(\d+\.\d+\.\d+)", text)
    return f"nvcc {found[1] if found else 'of unknown version'}"


@functools.cache
def _nvrtc() -> ctypes.CDLL:
    names = ["libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"]
    folders = [Path(entry or ".") / "nvidia" / kind / "lib" for entry in sys.path for kind in ("cu13", "cuda_nvrtc")]
    # NVRTC asks for its builtins by their bare name, and finds those of a wheel only if they are loaded already
    for builtins in (path for folder in folders for path in folder.glob("libnvrtc-builtins.so.*")):
        with contextlib.suppress(OSError):
            ctypes.CDLL(str(builtins))
    for path in [str(folder / name) for folder in folders for name in names if (folder / name).exists()] + names:
        with contextlib.suppress(OSError):
            return ctypes.CDLL(path)
    raise CompilerError("compile_kernels: neither nvcc nor NVRTC is here; pip install nvidia-cuda-nvcc")


def _nvrtc_version() -> str:
    major, minor = ctypes.c_int(), ctypes.c_int()
    _nvrtc().nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    return f"nvrtc {major.value}.{minor.value}"


def _compile_nvrtc(stem: str, arch: str) -> Compiled:
    lib = _nvrtc()
    name = f"{stem}.cu"
    options = ["--ptxas-options=-v", *_flags(arch)]
    command = " ".join([_nvrtc_version(), *options, str(SOURCES / name)])
    program = ctypes.c_void_p()
    source = (SOURCES / name).read_bytes()
    lib.nvrtcCreateProgram(ctypes.byref(program), source, name.encode(), 0, None, None)
    try:
        array = (ctypes.c_char_p * len(options))(*[o.encode() for o in options])
        failed = lib.nvrtcCompileProgram(program, len(options), array)
        size = ctypes.c_size_t()
        lib.nvrtcGetProgramLogSize(program, ctypes.byref(size))
        text = ctypes.create_string_buffer(size.value)
        lib.nvrtcGetProgramLog(program, text)
        log = text.value.decode(errors="replace")
        if failed:
            raise CompilerError(f"compile_kernels: {name} for {arch} failed, NVRTC error {failed}.\n{command}\n{log}")
        lib.nvrtcGetCUBINSize(program, ctypes.byref(size))
        cubin = ctypes.create_string_buffer(size.value)
        lib.nvrtcGetCUBIN(program, cubin)
        return Compiled(cubin.raw[: size.value], _parse_usage(log), _nvrtc_version(), command)
    finally:
        lib.nvrtcDestroyProgram(ctypes.byref(program))


_USAGE = re.compile(
    r"Compiling entry function '(\w+)'.*?(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads"
    r".*?Used (\d+) registers",
    re.DOTALL,
)


def _parse_usage(log: str) -> dict[str, Usage]:
    return {
        name: Usage(int(registers), int(stack), int(stores), int(loads))
        for name, stack, stores, loads, registers in _USAGE.findall(log)
    }


def cache_dir() -> Path:
    """Where compiled kernels are kept: ZIPCCL_CACHE_DIR, or zipccl in the user's cache."""
    if given := os.environ.get("ZIPCCL_CACHE_DIR"):
        return Path(given)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "zipccl"


def cached_cubin(stem: str, arch: str) -> bytes:
    """The machine code of a stem, compiled at most once for these sources, flags, compiler and architecture.

    Safe among ranks and hosts on one file system: whoever compiles writes aside and publishes by one rename; whoever
    comes at the same time does the same work and publishes the same bytes. A cache that cannot be written is only slow.
    """
    nvcc = nvcc_path()
    key = hashlib.sha256()
    for part in [_nvcc_version(nvcc) if nvcc else _nvrtc_version(), stem, *_flags(arch)[:3], repr(defines(arch))]:
        key.update(part.encode() + b"\0")
    for path in source_files(stem):
        key.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    target = cache_dir() / f"{stem}-{arch}-{key.hexdigest()[:32]}.cubin"
    with contextlib.suppress(OSError):
        return target.read_bytes()
    cubin = compile_kernels(stem, arch).cubin
    with contextlib.suppress(OSError):
        target.parent.mkdir(parents=True, exist_ok=True)
        handle, aside = tempfile.mkstemp(dir=target.parent, suffix=".tmp")
        with os.fdopen(handle, "wb") as file:
            file.write(cubin)
        os.replace(aside, target)
    return cubin


def warm(architectures: Sequence[str] | None = None) -> list[str]:
    """Compile everything ahead, so that no rank compiles while others wait for it with a deadline.

    Args:
        architectures: for example ARCHITECTURES; None for those of the visible devices.

    Returns:
        One line a cubin: stem, architecture, bytes, and where the cache is.

    Raises:
        InvalidArgument: None, and no device is visible.
        CompilerError: as compile_kernels.
    """
    if architectures is None:
        capabilities = {torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count())}
        architectures = sorted(f"sm_{major}{minor}" for major, minor in capabilities)
        if not architectures:
            raise InvalidArgument(f"warm: no CUDA device is visible; name architectures, for example {ARCHITECTURES}")
    return [
        f"{stem} {arch}: {len(cached_cubin(stem, arch))} bytes in {cache_dir()}"
        for arch in architectures
        for stem in STEMS
    ]


# --- Devices, contexts, streams ---------------------------------------------------------------------------------------


@functools.cache
def _driver() -> Any:
    try:
        driver = importlib.import_module("pycuda.driver")
    except ImportError as error:
        raise InvalidArgument(
            f"zipccl: tensors on CUDA need PyCUDA, which cannot be imported ({error}); "
            f"pip install 'zipccl-core[cuda]', or work on .cpu()"
        ) from error
    driver.init()
    return driver


class Start(NamedTuple):
    """A kernel with all that one launch of it was told: starting it again takes a fraction of putting that together."""

    function: Any
    grid: tuple[int, int]
    threads: tuple[int, int, int]
    arguments: bytes
    shared_bytes: int


def start(starts: Sequence[Start], stream: Any) -> None:
    """Start kernels, one after another, on a stream of PyCUDA's. Its own calls ask the driver for more each time."""
    for function, grid, threads, arguments, shared_bytes in starts:
        function._launch_kernel(grid, threads, arguments, shared_bytes, stream)


@dataclass(frozen=True)
class Kernel:
    """A kernel that is loaded.

    Attributes:
        function: PyCUDA's.
        pack: its arguments, as they lie in memory.
        shared_bytes: of dynamic shared memory.
        most_blocks: thread blocks that the device holds at once, of one with a persistent grid.
    """

    function: Any
    pack: Callable[..., bytes]
    shared_bytes: int = 0
    most_blocks: int = 0

    def told(self, grid: tuple[int, int], threads: int, *arguments: Any) -> Start:
        """What starts it with these arguments."""
        return Start(self.function, grid, (threads, 1, 1), self.pack(*arguments), self.shared_bytes)


class Device:
    """One device: its primary context, which torch uses too, the modules in it, and a pool of streams."""

    def __init__(self, index: int) -> None:
        driver = _driver()
        torch.cuda.init()  # type: ignore[no-untyped-call]
        device = driver.Device(index)
        self.index = index
        self.context = device.retain_primary_context()
        self.name = str(device.name())
        attribute = driver.device_attribute
        self.multiprocessors = int(device.get_attribute(attribute.MULTIPROCESSOR_COUNT))
        self.shared_bytes = int(device.get_attribute(attribute.MAX_SHARED_MEMORY_PER_MULTIPROCESSOR))
        self.arch = "sm_{}{}".format(*device.compute_capability())
        self.lock = threading.RLock()
        self.kernels: dict[str, Kernel] = {}
        self.scratch: dict[tuple[str, int], Tensor] = {}
        self.outgrown: list[Tensor] = []
        self.modules: dict[str, Any] = {}
        with self.pushed():
            # flag 1: non-blocking, or every kernel would wait for torch's default stream
            self.streams = [driver.Stream(1) for _ in range(STREAMS_A_DEVICE)]
        self.external = [torch.cuda.ExternalStream(int(s.handle), device=index) for s in self.streams]  # type: ignore[no-untyped-call]
        self.by_handle = {int(stream.handle): stream for stream in self.streams}

    @contextlib.contextmanager
    def pushed(self) -> Iterator[None]:
        """The context, for this thread: its stack is the thread's, and a thread must not end with one on it."""
        self.context.push()
        try:
            yield
        finally:
            _driver().Context.pop()

    def module(self, stem: str) -> Any:
        if stem not in self.modules:
            self.modules[stem] = _driver().module_from_buffer(cached_cubin(stem, self.arch))
        return self.modules[stem]

    def kernel(self, name: str, stem: str, signature: str) -> Kernel:
        """A kernel without dynamic shared memory; signature as in struct."""
        with self.lock:
            if name not in self.kernels:
                self.kernels[name] = Kernel(self.module(stem).get_function(name), struct.Struct(signature).pack)
            return self.kernels[name]

    def persistent(self, name: str, stem: str, kind: str, element_bytes: int, signature: str) -> Kernel:
        """A kernel with a persistent grid."""
        with self.lock:
            if name not in self.kernels:
                module = self.module(stem)
                address, size = module.get_global(f"{stem}_shared_bytes")
                sizes = bytearray(size)
                _driver().memcpy_dtoh(sizes, address)
                shared = struct.unpack("2I", sizes)[element_bytes == 4]
                function = module.get_function(name)
                function.set_attribute(_driver().function_attribute.MAX_DYNAMIC_SHARED_SIZE_BYTES, shared)
                # 1 KiB of shared memory a thread block is the system's
                blocks = min(resident_blocks(self.arch, kind, element_bytes), self.shared_bytes // (shared + 1024))
                most_blocks = max(1, blocks) * self.multiprocessors
                self.kernels[name] = Kernel(function, struct.Struct(signature).pack, shared, most_blocks)
            return self.kernels[name]

    def zeroed(self, purpose: str, stream_key: int, n_bytes: int) -> Tensor:
        """Scratch that is zero before a launch and that every launch leaves zero; one a stream: launches take turns."""
        if torch.cuda.is_current_stream_capturing():
            return torch.zeros(n_bytes, dtype=torch.uint8, device=f"cuda:{self.index}")
        with self.lock:
            have = self.scratch.get((purpose, stream_key))
            if have is None or have.numel() < n_bytes:
                if have is not None:
                    self.outgrown.append(have)  # a launch may still be using it
                grown = 1 << max(13, (n_bytes - 1).bit_length())
                have = torch.zeros(grown, dtype=torch.uint8, device=f"cuda:{self.index}")
                self.scratch[purpose, stream_key] = have
            return have


class Place(Protocol):
    """Where a launcher launches: on a stream that is ordered as its maker says.

    Attributes:
        device: see Device.
        stream: PyCUDA's; None is the default stream.
    """

    device: Device
    stream: Any

    def zeroed(self, purpose: str, n_bytes: int) -> int:
        """Address of scratch that is zero before a launch, and that every launch must leave zero; before begin()."""

    def most_blocks(self, most: int) -> int:
        """Thread blocks of a persistent grid, of those that the device holds at once."""

    def begin(self) -> None:
        """After all memory of a launch is there, before the launch."""


_devices: dict[int, Device] = {}
_devices_lock = threading.Lock()


def device_of(tensor: Tensor) -> Device:
    """The device of a CUDA tensor, set up on first use: a context, four streams."""
    index = tensor.device.index if tensor.device.index is not None else torch.cuda.current_device()
    found = _devices.get(index)
    if found is None:
        with _devices_lock:
            if index not in _devices:
                _devices[index] = Device(index)
            found = _devices[index]
    return found


class Launch:
    """A stretch of launches ordered after and before work on torch's current stream; a context manager.

    PyCUDA launches on streams of its own making only. On torch's default stream, and on a stream of our pool, launches
    go there directly; from any other stream they go to one of the pool, between two events. Nothing waits on the host.

    Attributes:
        device: the Device.
        stream: PyCUDA's; None is the default stream.
        key: which scratch belongs to this stream.
    """

    def __init__(self, tensor: Tensor) -> None:
        self.device = device_of(tensor)
        self._guard = torch.cuda.device(self.device.index) if torch.cuda.current_device() != self.device.index else None

    def __enter__(self) -> Launch:
        if self._guard is not None:
            self._guard.__enter__()  # type: ignore[no-untyped-call]
        handle = torch._C._cuda_getCurrentRawStream(self.device.index)
        self._ours: torch.cuda.ExternalStream | None = None
        self.stream, self.key = None, 0
        if handle:
            self.stream = self.device.by_handle.get(handle)
            if self.stream is None:
                chosen = (handle >> 4) % STREAMS_A_DEVICE
                self.stream, self._ours = self.device.streams[chosen], self.device.external[chosen]
                self._caller = torch.cuda.current_stream(self.device.index)
            self.key = int(self.stream.handle)
        return self

    def begin(self) -> None:
        """After memory has been allocated and filled on the caller's stream, before the first launch."""
        if self._ours is not None:
            self._ours.wait_stream(self._caller)
        self.device.context.push()  # per launch: the stack is the thread's, and no thread may end with one on it
        self._begun = True

    def zeroed(self, purpose: str, n_bytes: int) -> int:
        """See Place."""
        return self.device.zeroed(purpose, self.key, n_bytes).data_ptr()

    def most_blocks(self, most: int) -> int:
        """See Place."""
        return most

    _begun = False

    def __exit__(self, *error: object) -> None:
        if self._begun:
            _driver().Context.pop()
            if self._ours is not None:
                self._caller.wait_stream(self._ours)
        if self._guard is not None:
            self._guard.__exit__(*error)  # type: ignore[no-untyped-call]


class Lane:
    """A stream for launches of one thread at a time, and memory that they take turns with.

    Whoever launches has pushed the device's context.

    Args:
        stream: PyCUDA's, that nobody else has and that does not wait for the default stream; None for that one.

    Attributes:
        device, stream: see Place.
        torch_stream, handle: the same stream, for torch and for others.
        shares: whether the next launches leave multiprocessors free for what runs beside them.
        generation: another one whenever memory that earlier launches were told of is given up.
    """

    def __init__(self, device: Device, stream: Any) -> None:
        self.device, self.stream, self.handle = device, stream, int(stream.handle) if stream else 0
        self.torch_stream: torch.cuda.Stream = (
            torch.cuda.ExternalStream(self.handle, device=device.index)  # type: ignore[no-untyped-call]
            if stream
            else torch.cuda.default_stream(device.index)
        )
        self.shares, self.generation = False, 0
        self._kept: dict[str, tuple[int, int, Tensor]] = {}

    def most_blocks(self, most: int) -> int:
        """See Place. One a multiprocessor if it shares: more would be spread over all."""
        return max(1, self.device.multiprocessors - LEFT_FREE) if self.shares else most

    def zeroed(self, purpose: str, n_bytes: int) -> int:
        """See Place."""
        return self._room(purpose, n_bytes, torch.zeros)

    def room(self, purpose: str, n_bytes: int) -> int:
        """Address of memory for what one launch on this lane leaves to what comes behind it."""
        return self._room(purpose, n_bytes, torch.empty)

    def _room(self, purpose: str, n_bytes: int, make: Callable[..., Tensor]) -> int:
        address, size, _ = self._kept.get(purpose, (0, -1, None))
        if size < n_bytes:
            size = 1 << max(13, (n_bytes - 1).bit_length())
            self.generation += 1
            with torch.cuda.stream(self.torch_stream):  # what it replaces is taken by nobody ahead of this stream
                made = make(size, dtype=torch.uint8, device=f"cuda:{self.device.index}")
            address = made.data_ptr()
            self._kept[purpose] = address, size, made
        return address

    def begin(self) -> None:
        """See Place."""

    def to_host(self, target: Tensor, source: int) -> None:
        """Fill a pinned uint8 tensor from an address on the device, behind what the stream holds."""
        _driver().memcpy_dtoh_async(target.numpy(), source, self.stream)

    def copy(self, target: int, source: int, n_bytes: int) -> None:
        """Copy between two addresses on the device, behind what the stream holds."""
        _driver().memcpy_dtod_async(target, source, n_bytes, self.stream)


_idle: dict[int, list[Any]] = {}
"""Device index → streams that were lent and are not in use."""


def lend_lanes(device: torch.device, count: int) -> list[Lane]:
    """So many lanes that nobody else has, until they are taken back."""
    found = device_of(torch.empty(0, device=device))
    with found.lock, found.pushed():
        idle = _idle.setdefault(found.index, [])
        lent = [idle.pop() if idle else _driver().Stream(1) for _ in range(count)]
    return [Lane(found, stream) for stream in lent]


def default_lane(device: torch.device) -> Lane:
    """A lane on the default stream, with memory of its own."""
    return Lane(device_of(torch.empty(0, device=device)), None)


def take_back_lanes(lanes: Sequence[Lane]) -> None:
    """Lend their streams to others from now on. Nothing may be left in them."""
    for lane in lanes:
        with lane.device.lock:
            _idle[lane.device.index].append(lane.stream)


def pool_streams(device: torch.device | int) -> list[torch.cuda.ExternalStream]:
    """The pool's streams, for torch: launches from them need no events.

    Non-blocking with respect to the default stream; call record_stream on what crosses.
    """
    index = device if isinstance(device, int) else device.index or 0
    return list(device_of(torch.empty(0, device=f"cuda:{index}")).external)


# --- Job tables -------------------------------------------------------------------------------------------------------

_JOB = struct.Struct("<6Q2IQ")
_TABLE = struct.Struct("<2IQ")
assert _JOB.size == JOB_BYTES
TABLE_SIGNATURE = f"{_TABLE.size + INLINE_JOBS * JOB_BYTES}s"


class Job(NamedTuple):
    """One frame of a launch; FrameJob of layout.cuh. Addresses in bytes, 0 for none."""

    words: int
    frame: int
    n: int
    capacity_bytes: int
    codebook_address: int = 0
    codebook: int = 0
    coded: bool = True  # False: no block of it is touched, only its header read
    header_copy: int = 0  # of a frame that is encoded: pinned memory of the host for its header


class Table(NamedTuple):
    """Jobs as a kernel takes them: `packed` for TABLE_SIGNATURE, and what must live until it is launched."""

    packed: bytes
    jobs: int
    tiles: int
    device_copy: Tensor | None


def make_table(jobs: Sequence[Job], device: torch.device, *, same_tiles: bool = False) -> Table:
    """Pack jobs. Up to INLINE_JOBS travel with the launch; more are copied to the device without waiting.

    Args:
        same_tiles: all jobs are about the same tiles (decode_reduce), instead of one after another.

    Raises:
        InvalidArgument: more than 2**31 blocks; or more than INLINE_JOBS frames under CUDA graph capture.
    """
    first = 0
    packed = bytearray()
    for job in jobs:
        tiles = n_blocks(job.n) if job.coded else 0
        packed += _JOB.pack(*job[:6], 0 if same_tiles else first, tiles, job.header_copy)
        first += tiles
    tiles = n_blocks(jobs[0].n) if same_tiles and jobs else first
    if first >= MAX_TILES:
        raise InvalidArgument(f"launch: at most {MAX_TILES} blocks in one launch, got {first}; split it")
    address, copy = 0, None
    if len(jobs) > INLINE_JOBS:
        if torch.cuda.is_current_stream_capturing():
            raise InvalidArgument(f"launch: a CUDA graph can hold at most {INLINE_JOBS} frames a launch")
        pinned = torch.frombuffer(packed, dtype=torch.uint8).pin_memory()
        copy = pinned.to(device, non_blocking=True)  # torch keeps the pinned block until the copy is done
        address = copy.data_ptr()
        packed = bytearray()
    return Table(_TABLE.pack(len(jobs), tiles, address) + bytes(packed), len(jobs), tiles, copy)


def element_bytes_of(what: str, tensors: Sequence[Tensor]) -> int:
    """2 or 4: the dtype that all the tensors of a launch have.

    Raises:
        InvalidArgument: none, several dtypes or devices, another dtype or device type, or not contiguous.
    """
    if not tensors:
        raise InvalidArgument(f"{what}: wanted at least one tensor, got none")
    first = tensors[0]
    for i, tensor in enumerate(tensors):
        if tensor.dtype != first.dtype or tensor.device != first.device:
            raise InvalidArgument(
                f"{what}: all tensors of a launch must be {first.dtype} on {first.device}, got {tensor.dtype} on "
                f"{tensor.device} at index {i}; launch them apart"
            )
        if not tensor.is_contiguous():
            raise InvalidArgument(f"{what}: tensor {i} must be contiguous, got strides {tensor.stride()}")
    if first.device.type != "cuda":
        raise InvalidArgument(f"{what}: tensors must be on cuda, got {first.device}")
    return ELEMENT_BYTES[dtype_name(first.dtype)]


def check_frame(what: str, index: int, frame: Tensor, like: Tensor) -> None:
    """A buffer for a frame: contiguous uint8 vector on the same device, at a multiple of 128 bytes.

    Raises:
        InvalidArgument: it is not.
    """
    if frame.dtype != torch.uint8 or frame.dim() != 1 or not frame.is_contiguous() or frame.device != like.device:
        raise InvalidArgument(
            f"{what}: frame {index} must be a contiguous uint8 vector on {like.device}, got {frame.dtype} of shape "
            f"{tuple(frame.shape)} on {frame.device}"
        )
    if frame.data_ptr() % ALIGN_BYTES and frame.numel():
        raise InvalidArgument(
            f"{what}: frame {index} must begin at a multiple of {ALIGN_BYTES} bytes, got address "
            f"{frame.data_ptr():#x}; allocate frames apart, or space them so"
        )
