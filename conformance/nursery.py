"""A process that has imported torch once, and from which others are forked: a rank then starts in milliseconds.

    with Nursery() as nursery:
        child = nursery.start("pytest:main", ["conformance/meta", "-q"], stdout=log)
        child.wait(60)

Importing torch, pytest and Hypothesis costs each process two to three seconds of a core; a run of four ranks starts
six processes. The launcher starts a nursery and lets torchrun, and each rank, be forked from it; tests that launch many
runs share one (`shared()`), which processes below find through the environment. A nursery is single-threaded, and
never opens a process group or a GPU: what is forked from it is as good as new. Where there is none (another system
than Linux, CONFORMANCE_NURSERY=0, an environment that differs in what is read at import) processes are started from
scratch and everything works the same, slower.

Imports the standard library only; the server also imports torch and pytest.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import importlib
import json
import os
import selectors
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).resolve().parent.parent
SOCKET_ENV = "CONFORMANCE_NURSERY"
PR_SET_PDEATHSIG = 1
CONNECT_LIMIT_S = 60.0
HELLO_LIMIT_S = 120.0
LENGTH = struct.Struct("<I")
READ_AT_IMPORT = (
    *("OMP_", "MKL_", "KMP_", "GOMP_", "OPENBLAS_", "LD_", "PYTHON", "GLOG_", "MALLOC_"),
    *("TORCH_LOGS", "TORCH_CPP_LOG_LEVEL", "TORCH_DISTRIBUTED_DEBUG", "TORCH_DEVICE_BACKEND"),
)
"""Environment variables that a process reads while it starts: they must be the nursery's own."""
MAY_DIFFER = ("PYTHONPATH", "PYTHONUNBUFFERED")


class NoNursery(RuntimeError):
    """The process cannot be forked from a nursery; start it from scratch."""


def die_with_parent(sig: int = signal.SIGKILL) -> None:
    """Have the kernel send this process `sig` when its parent ends (Linux; elsewhere nothing is done)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, sig)


def _import_time(env: Mapping[str, str]) -> dict[str, str]:
    return {k: v for k, v in env.items() if k.startswith(READ_AT_IMPORT) and k not in MAY_DIFFER}


# ------------------------------------------------------------------------------------------------------ clients


class Child:
    """A forked process, with the names of subprocess.Popen. If this end goes away, the child gets `on_hangup`."""

    def __init__(self, connection: socket.socket, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._connection = connection

    def poll(self) -> int | None:
        """The return code, or None while it runs; −9 if the nursery itself has died, which takes its children along."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0.0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """The return code as Popen gives it.

        Raises:
            subprocess.TimeoutExpired: it still runs after timeout seconds.
        """
        if self.returncode is None:
            with selectors.DefaultSelector() as selector:
                selector.register(self._connection, selectors.EVENT_READ)
                if not selector.select(timeout):
                    raise subprocess.TimeoutExpired(f"forked process {self.pid}", timeout or 0.0)
            answer = _receive(self._connection)
            self.returncode = -signal.SIGKILL if answer is None else int(answer["code"])
            self._connection.close()
        return self.returncode

    def send_signal(self, sig: int) -> None:
        """Send it, unless the process is known to have ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, sig)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def fork(
    path: str,
    main: str,
    args: Sequence[str],
    *,
    env: Mapping[str, str],
    cwd: Path,
    stdout: IO[Any] | int,
    stderr: IO[Any] | int,
    on_hangup: int = signal.SIGKILL,
) -> Child:
    """Have the nursery at `path` fork a process, in a session of its own, that exits with what main(args) returns.

    Args:
        path: of its socket.
        main: "module:function", called with a list of strings.
        env, cwd: of the process. Its sys.path begins with cwd and PYTHONPATH.
        stdout, stderr: files or descriptors; stdin is empty.
        on_hangup: the signal it gets if the returned Child is dropped or this process ends; also if the nursery ends.

    Raises:
        NoNursery: there is none at path, or its environment is another.
    """
    request = {"do": "fork", "main": main, "args": list(map(str, args)), "env": dict(env), "cwd": str(cwd)}
    request |= {"on_hangup": int(on_hangup), "python": sys.executable, "root": str(ROOT)}
    with open(os.devnull) as empty:
        files = [f if isinstance(f, int) else f.fileno() for f in (empty, stdout, stderr)]
        connection = _ask(path, request, files)
    answer = _receive(connection)
    if answer is None or "pid" not in answer:
        connection.close()
        raise NoNursery(f"the nursery refused: {answer['refused'] if answer else 'it ended'}")
    return Child(connection, answer["pid"])


def warm(path: str, args: Sequence[str], cwd: Path, modules: Sequence[str] = ()) -> None:
    """Have the nursery import modules and what pytest collects for args, once. Returns at once: forks come after it."""
    request = {"do": "warm", "args": list(map(str, args)), "cwd": str(cwd), "modules": list(modules)}
    with contextlib.suppress(NoNursery):
        _ask(path, request, []).close()


def _ask(path: str, request: dict[str, Any], files: list[int]) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(CONNECT_LIMIT_S)
    payload = json.dumps(request).encode()
    try:
        connection.connect(path)
        socket.send_fds(connection, [LENGTH.pack(len(payload))], files)
        connection.sendall(payload)
    except OSError as e:
        connection.close()
        raise NoNursery(f"no nursery at {path}: {e}") from e
    connection.settimeout(None)
    return connection


def _read(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        with contextlib.suppress(ConnectionResetError):
            if piece := connection.recv(count - len(data)):
                data += piece
                continue
        return b""
    return data


def _receive(connection: socket.socket) -> dict[str, Any] | None:
    """The next message; None at the end."""
    head = _read(connection, LENGTH.size)
    body = _read(connection, LENGTH.unpack(head)[0]) if head else b""
    return json.loads(body) if body else None


class Nursery:
    """Starts a nursery; ends it, and what was forked from it, with `close()` or with this process."""

    def __init__(self, env: Mapping[str, str] | None = None, log: IO[Any] | int = subprocess.DEVNULL) -> None:
        if sys.platform != "linux" or os.environ.get(SOCKET_ENV) == "0":
            raise NoNursery(f"nurseries need Linux, and {SOCKET_ENV} other than 0")
        self._folder = tempfile.TemporaryDirectory(prefix="nursery-")
        self.path = str(Path(self._folder.name, "s"))
        env = dict(os.environ if env is None else env)
        env["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [env.get("PYTHONPATH")])])
        for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "PYTEST_ADDOPTS", SOCKET_ENV):
            env.pop(name, None)
        # The socket listens before torch is imported, so that requests can be made at once.
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            listener.bind(self.path)
            listener.listen(128)
            self._process = subprocess.Popen(
                [sys.executable, "-u", "-m", "conformance.nursery", str(listener.fileno())],
                cwd=ROOT,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[listener.fileno()],
                start_new_session=True,
                preexec_fn=functools.partial(die_with_parent, signal.SIGTERM),
            )

    def start(self, main: str, args: Sequence[str], **how: Any) -> Child:
        """`fork` from this nursery; env and cwd default to this process's."""
        how = {"env": dict(os.environ), "cwd": Path.cwd(), "stdout": 1, "stderr": 2} | how
        how["env"] = {**how["env"], SOCKET_ENV: self.path}
        return fork(self.path, main, args, **how)

    def close(self) -> None:
        """End it. A second close does nothing."""
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        self._folder.cleanup()

    def __enter__(self) -> Nursery:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@contextlib.contextmanager
def nearest(env: Mapping[str, str], log: IO[Any] | int = subprocess.DEVNULL) -> Iterator[str | None]:
    """The socket of the nursery named in env, else of one that lives as long as this context; None if none can."""
    if given := env.get(SOCKET_ENV):
        yield given if given != "0" and Path(given).exists() else None
        return
    try:
        nursery = Nursery(env, log)
    except (NoNursery, OSError):
        yield None
        return
    with nursery:
        yield nursery.path


@functools.cache
def shared() -> Nursery:
    """One nursery for this process and all it starts, to its end; OMP_NUM_THREADS is 1 unless set.

    Raises:
        NoNursery: not on this system.
    """
    import atexit

    nursery = Nursery({"OMP_NUM_THREADS": "1", **os.environ})
    atexit.register(nursery.close)
    return nursery


# ------------------------------------------------------------------------------------------------------- server


class _Server:
    """Takes one request at a time, forks, and tells each client how its child ended."""

    def __init__(self, listener: socket.socket) -> None:
        self.listener = listener
        self.selector = selectors.DefaultSelector()
        self.children: dict[int, tuple[socket.socket, int]] = {}
        self.warmed: set[str] = set()
        self.base_path = [p for p in sys.path[1:] if p not in os.environ.get("PYTHONPATH", "").split(os.pathsep)]
        self.wake_read, self.wake_write = os.pipe()
        os.set_blocking(self.wake_write, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self.wake_write, warn_on_full_buffer=False)
        self.selector.register(listener, selectors.EVENT_READ, "listener")
        self.selector.register(self.wake_read, selectors.EVENT_READ, "wake")

    def run(self) -> None:
        while True:
            for key, _ in self.selector.select():
                if key.data == "listener":
                    self.take(self.listener.accept()[0])
                elif key.data == "wake":
                    os.read(self.wake_read, 4096)
                elif key.data in self.children:  # a client went away: it never sends twice
                    self.hang_up(key.data)
                self.reap()

    def take(self, connection: socket.socket) -> None:
        files: list[int] = []
        try:
            connection.settimeout(HELLO_LIMIT_S)
            head, files, _, _ = socket.recv_fds(connection, LENGTH.size, 3)
            body = _read(connection, LENGTH.unpack(head)[0]) if len(head) == LENGTH.size else b""
            connection.settimeout(None)
            if not body:
                connection.close()
                return
            request = json.loads(body)
            if request["do"] == "warm":
                connection.close()
                self.warm(request)
            else:
                self.fork(connection, request, files)
        except OSError:
            connection.close()
        finally:
            for fd in files:
                os.close(fd)

    def refusal(self, request: dict[str, Any]) -> str:
        """Why this request cannot be served; "" if it can."""
        mine, theirs = _import_time(os.environ), _import_time(request["env"])
        if mine != theirs:
            return f"environment differs in {sorted(k for k in mine | theirs if mine.get(k) != theirs.get(k))}"
        if (request["python"], request["root"]) != (sys.executable, str(ROOT)):
            return f"this is {sys.executable} with {ROOT}"
        if (threads := len(os.listdir("/proc/self/task"))) > 1:
            return f"it has {threads} threads: something it imported started them"
        return ""

    def fork(self, connection: socket.socket, request: dict[str, Any], files: list[int]) -> None:
        if why := self.refusal(request):
            print(f"refused: {why}", flush=True)
            _answer(connection, refused=why)
            connection.close()
            return
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            code = 70
            try:
                self.become(connection, request, files, parent)
                code = _call(request["main"], request["args"])
            except BaseException:
                traceback.print_exc()
            finally:
                for stream in (sys.stdout, sys.stderr):
                    with contextlib.suppress(Exception):
                        stream.flush()
                os._exit(code & 0xFF)
        try:
            _answer(connection, pid=pid)
        except OSError:  # who asked is gone; reap() passes over what it does not know
            os.kill(pid, signal.SIGKILL)
            raise
        self.children[pid] = connection, request["on_hangup"]
        self.selector.register(connection, selectors.EVENT_READ, pid)

    def become(self, connection: socket.socket, request: dict[str, Any], files: list[int], parent: int) -> None:
        """In the child: leave everything of the nursery behind, and look like a process started from scratch."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        die_with_parent(request["on_hangup"])
        if os.getppid() != parent:
            os._exit(70)
        os.setsid()
        self.selector.close()
        for other in (self.listener, connection, *(c for c, _ in self.children.values())):
            other.close()
        os.close(self.wake_read)
        os.close(self.wake_write)
        for target, fd in enumerate(files):
            os.dup2(fd, target)
        for fd in files:
            os.close(fd)
        os.environ.clear()
        os.environ.update(request["env"])
        os.chdir(request["cwd"])
        self.put_path(request["cwd"])
        sys.argv = [request["main"], *request["args"]]
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed()

    def put_path(self, cwd: str) -> None:
        named = [p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p]
        sys.path[:] = list(dict.fromkeys([cwd, *named, *self.base_path]))

    def warm(self, request: dict[str, Any]) -> None:
        """Import the modules, and the test files of args through pytest, so that their asserts are rewritten once."""
        key = json.dumps(request, sort_keys=True)
        if key in self.warmed:
            return
        self.warmed.add(key)
        began = time.monotonic()
        for name in request["modules"]:
            with contextlib.suppress(Exception):
                importlib.import_module(name)
        if request["args"]:
            before, path, signals = os.getcwd(), list(sys.path), signal.getsignal(signal.SIGINT)
            os.chdir(request["cwd"])
            self.put_path(request["cwd"])
            try:
                pytest_main(
                    ["--collect-only", "-q", "-p", "no:cacheprovider", "-p", "no:faulthandler", *request["args"]]
                )
            except Exception:
                traceback.print_exc()  # the ranks will meet it too, and report it
            finally:
                os.chdir(before)
                sys.path[:] = path
                signal.signal(signal.SIGINT, signals)
        gc.collect()
        gc.freeze()
        print(f"warm after {time.monotonic() - began:.2f} s: {request}", flush=True)

    def hang_up(self, pid: int) -> None:
        connection, sig = self.children[pid]
        with contextlib.suppress(KeyError):
            self.selector.unregister(connection)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, sig)

    def reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid not in self.children:
                continue
            connection, _ = self.children.pop(pid)
            with contextlib.suppress(KeyError):
                self.selector.unregister(connection)
            with contextlib.suppress(OSError):
                _answer(connection, code=os.waitstatus_to_exitcode(status))
            connection.close()


def _answer(connection: socket.socket, **fields: Any) -> None:
    payload = json.dumps(fields).encode()
    connection.sendall(LENGTH.pack(len(payload)) + payload)


def pytest_main(args: Sequence[str]) -> int:
    """`python -m pytest ARGS` in this process, whatever it has imported already."""
    import pytest

    quiet = ["-W", "ignore::pytest.PytestAssertRewriteWarning"] if "hypothesis" in sys.modules else []
    return int(pytest.main([*quiet, *args]))


def _call(main: str, args: list[str]) -> int:
    """What main(args) returns, or the code it exits with."""
    module, _, name = main.partition(":")
    try:
        return int(getattr(importlib.import_module(module), name)(args) or 0)
    except SystemExit as e:
        if isinstance(e.code, str):
            print(e.code, file=sys.stderr)
        return e.code if isinstance(e.code, int) else int(e.code is not None)


def serve(fd: int) -> None:
    """The nursery itself. Hypothesis is imported before pytest could rewrite its asserts."""
    began = time.monotonic()
    for name in ("torch", "torch.distributed.run", "numpy"):
        importlib.import_module(name)
    server = _Server(socket.socket(fileno=fd))
    print(f"torch imported after {time.monotonic() - began:.2f} s", flush=True)
    gc.freeze()
    server.run()


if __name__ == "__main__":
    serve(int(sys.argv[1]))
