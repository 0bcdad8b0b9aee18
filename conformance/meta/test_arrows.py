"""Who may import whom (docs/DESIGN.md), read from the sources; and importing does nothing else."""

from __future__ import annotations

import ast
import functools
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from conformance.meta.launching import ROOT

pytestmark = pytest.mark.outer

CORE = "zipccl_core"
# Each may import itself and those it names; the order is that of docs/DESIGN.md.
CORE_MAY = {
    "errors": (),
    "frame": ("errors",),
    "codebook": ("errors", "frame"),
    "codec": ("errors", "frame", "codebook"),
    "policy.threshold": (),
    "policy.switch": ("errors", "frame", "codebook", "policy.threshold"),
    "policy": ("errors", "policy.switch"),
    "collectives": ("errors", "frame", "codebook", "codec", "policy", "policy.threshold", "policy.switch"),
}
SEAMS = ("torch_backend", "ddp", "fsdp2")
JIT = "zipccl_core.codec.cuda.jit"


def modules(package: str) -> Iterator[tuple[str, Path]]:
    """(dotted name, file) of every source file of a package of this repository."""
    for path in sorted((ROOT / package).rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


@functools.cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def imports(name: str, path: Path) -> set[str]:
    """Every module a file imports, anywhere in it; names from packages are taken as modules too."""
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    found = set()
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package.rsplit(".", node.level - 1)[0] if node.level else ""
            source = ".".join(filter(None, [base, node.module]))
            found |= {source} | {f"{source}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") in ("import_module", "__import__"):
            found |= {a.value for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, str)}
    return found


def within(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")


def unit(module: str) -> str:
    """Which unit of CORE_MAY, or which file, a module of the core belongs to."""
    rest = module.removeprefix(CORE).lstrip(".")
    fitting = [u for u in (*CORE_MAY, *SEAMS) if within(rest, u)]
    return max(fitting, key=len) if fitting else rest


def core_modules() -> list[tuple[str, Path]]:
    return [(n, p) for n, p in modules(CORE) if not within(n, f"{CORE}.tests")]


def test_core_imports_follow_the_arrows():
    files = {name for name, _ in core_modules()}
    wrong = []
    for name, path in core_modules():
        mine = unit(name)
        if mine not in CORE_MAY:
            continue
        for target in imports(name, path) & files:
            theirs = unit(target)
            # A package's own __init__ is imported with every module of it, and says nothing.
            if theirs not in (mine, *CORE_MAY[mine]) and not within(name, target):
                wrong.append(f"{name} imports {target}")
    assert not wrong, f"against the arrows of docs/DESIGN.md: {wrong}"


def test_every_module_of_the_core_has_its_place_in_the_arrows():
    known = {*CORE_MAY, *SEAMS, "", "cli", "bench", "__main__"}
    strangers = [n for n, _ in core_modules() if unit(n) not in known]
    assert not strangers, f"give these modules a place in the arrows: {strangers}"


def test_the_core_imports_nothing_that_judges():
    wrong = [
        f"{name} imports {target}"
        for name, path in modules(CORE)
        if not within(name, f"{CORE}.tests")
        for target in imports(name, path)
        if target.split(".")[0] in ("conformance", "faults", "fixtures", "benchmarks", "examples")
    ]
    assert not wrong, f"the core must stand alone: {wrong}"


def test_only_subjects_and_fixtures_see_the_core():
    wrong = []
    for package in ("conformance", "faults", "fixtures"):
        for name, path in modules(package):
            allowed = within(name, "conformance.subjects") or package == "fixtures"
            if not allowed and any(within(t, CORE) for t in imports(name, path)):
                wrong.append(name)
    assert not wrong, f"judges see the core through a Subject only: {wrong}"


def test_faults_import_conformance_and_never_back():
    wrong = [n for n, p in modules("conformance") if any(within(t, "faults") for t in imports(n, p))]
    assert not wrong, f"conformance must not know faults: {wrong}"


@pytest.mark.parametrize(
    "name, may", [("subject", set()), ("nursery", set()), ("launch", {"conformance.nursery"})], ids=lambda x: str(x)
)
def test_subject_and_launcher_import_nothing_of_ours(name, may):
    [(module, path)] = [(n, p) for n, p in modules("conformance") if n == f"conformance.{name}"]
    files = {n for package in ("conformance", CORE, "faults", "fixtures") for n, _ in modules(package)}
    ours = {t for t in imports(module, path) & files if t not in may | {"conformance"}}
    assert not ours, f"{module} must import nothing of ours but {may}, imports {ours}"


def test_only_jit_imports_pycuda():
    wrong = [
        name
        for package in (CORE, "conformance", "faults", "fixtures")
        for name, path in modules(package)
        if name != JIT and any(within(t, "pycuda") for t in imports(name, path))
    ]
    assert not wrong, f"only {JIT} may import pycuda: {wrong}"


def test_frame_needs_the_standard_library_only():
    path = ROOT / CORE / "frame.py"
    outside = {
        t.split(".")[0]
        for t in imports(f"{CORE}.frame", path)
        if t.split(".")[0] not in sys.stdlib_module_names and not within(t, CORE)
    }
    assert not outside, f"frame.py imports {outside}"


# What a module does when it is imported: these calls may not stand outside functions.
SIDE_EFFECTS = {"mkdir", "makedirs", "init", "init_process_group", "is_available", "device_count", "compile_kernel"}
SIDE_EFFECTS |= {"SourceModule", "run", "Popen", "check_call", "check_output", "system", "basicConfig", "write_text"}


def at_import(node: ast.AST) -> Iterator[ast.Call]:
    """Calls that run when the module is imported: not in functions, nor under `if __name__ == "__main__"`."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            continue
        if isinstance(child, ast.If) and "__name__" in ast.unparse(child.test):
            continue
        if isinstance(child, ast.Call):
            yield child
        yield from at_import(child)


def test_no_module_acts_when_it_is_imported():
    wrong = []
    for package in (CORE, "conformance", "faults", "fixtures"):
        for name, path in modules(package):
            for call in at_import(tree(path)):
                called = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
                if called in SIDE_EFFECTS:
                    wrong.append(f"{name}:{call.lineno} {ast.unparse(call)[:60]}")
    assert not wrong, f"importing must do nothing: {wrong}"


WATCHED = """
import importlib, os, sys, threading
names = sys.argv[1:]
import torch
watched = {"os.mkdir", "subprocess.Popen", "os.system", "os.fork", "os.posix_spawn"}
seen, armed = [], True
def hook(event, args):
    if not armed:
        return
    writes = event == "open" and isinstance(args[1], str) and set(args[1]) & set("wax+")
    if (event in watched or writes) and "__pycache__" not in str(args[0]):
        seen.append(f"{event} {args[0]!r}")
sys.addaudithook(hook)
before = threading.active_count()
for name in names:
    importlib.import_module(name)
armed = False
assert not seen, f"importing {names} did: {seen}"
assert threading.active_count() == before, "importing started threads"
assert not torch.cuda.is_initialized(), "importing initialised CUDA"
assert "pycuda" not in sys.modules, "importing brought in pycuda"
"""


def test_importing_the_core_starts_nothing_and_writes_nothing():
    names = [n for n, _ in core_modules() if n != JIT and not n.endswith(("__main__", ".cli"))]
    env = {k: v for k, v in os.environ.items() if not k.startswith("ZIPCCL_")}
    done = subprocess.run(
        [sys.executable, "-c", WATCHED, *names], cwd=ROOT, env=env, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr[-2000:]
