"""Kernels compile for every architecture without a GPU, without spills; the cache is safe; errors tell what to do."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from conformance import record
from zipccl_core import cli
from zipccl_core.codec.cuda import jit
from zipccl_core.errors import InvalidArgument


@pytest.mark.parametrize("arch", jit.ARCHITECTURES)
@pytest.mark.parametrize("stem", jit.STEMS)
def test_no_kernel_spills_or_uses_local_memory(stem, arch):
    compiled = jit.compile_kernels(stem, arch)
    assert compiled.cubin[:4] == b"\x7fELF"
    assert set(compiled.usage) == set(jit.entry_points(stem)) != set()
    for kernel, usage in compiled.usage.items():
        assert usage.registers > 0
        assert (usage.stack_bytes, usage.spill_store_bytes, usage.spill_load_bytes) == (0, 0, 0), f"{kernel}: {usage}"


@pytest.mark.parametrize("stem", ["encode", "decode", "decode_reduce"])
def test_nvrtc_compiles_what_nvcc_compiles(stem):
    assert jit.compile_kernels(stem, "sm_90", compiler="nvrtc").cubin[:4] == b"\x7fELF"


def test_importing_and_compiling_imports_no_pycuda():
    code = (
        "import sys; from zipccl_core.codec.cuda import decode, decode_reduce, encode, jit, stats, tensors; "
        "jit.compile_kernels('stats', 'sm_90'); assert not [m for m in sys.modules if 'pycuda' in m]"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_jit_is_the_only_module_that_names_pycuda():
    for path in jit.SOURCES.glob("*.py"):
        assert path.name == "jit.py" or "pycuda" not in path.read_text(encoding="utf-8").lower().replace(
            "pycuda loads", ""
        ).replace("importer of pycuda", ""), path


def test_a_compiler_error_shows_command_and_log(tmp_path, monkeypatch):
    (tmp_path / "stats.cu").write_text("this is no CUDA\n", encoding="utf-8")
    monkeypatch.setattr(jit, "SOURCES", tmp_path)
    with pytest.raises(jit.CompilerError) as failure:
        jit.compile_kernels("stats", "sm_90")
    assert "ZIPCCL_BLOCK_WORDS=8192" in str(failure.value)
    assert "this is no CUDA" in str(failure.value) or "error" in str(failure.value)


def test_an_unknown_stem_or_compiler_is_refused():
    for stem, chosen in (("nothing", "auto"), ("stats", "gcc")):
        with pytest.raises(InvalidArgument, match="compile_kernels"):
            jit.compile_kernels(stem, "sm_90", compiler=chosen)


def test_the_cache_is_written_once_and_read_by_all(tmp_path, monkeypatch):
    monkeypatch.setenv("ZIPCCL_CACHE_DIR", str(tmp_path / "cache"))
    results: list[bytes] = []
    threads = [threading.Thread(target=lambda: results.append(jit.cached_cubin("stats", "sm_90"))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(results)) == 1
    files = list((tmp_path / "cache").iterdir())
    assert [f.suffix for f in files] == [".cubin"]
    monkeypatch.setattr(jit, "compile_kernels", lambda *_, **__: pytest.fail("compiled again"))
    assert jit.cached_cubin("stats", "sm_90") == results[0]


def test_a_changed_source_flag_or_architecture_is_another_entry(tmp_path, monkeypatch):
    monkeypatch.setenv("ZIPCCL_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(
        jit, "compile_kernels", lambda stem, arch: jit.Compiled(f"{stem} {arch}".encode(), {}, "none", "none")
    )
    jit.cached_cubin("stats", "sm_90")
    jit.cached_cubin("stats", "sm_80")
    jit.cached_cubin("encode", "sm_90")
    monkeypatch.setitem(jit.STAGES, "ENCODE", 7)
    jit.cached_cubin("encode", "sm_90")
    assert len(list(tmp_path.iterdir())) == 4


def test_a_cache_that_cannot_be_written_is_only_slow(tmp_path, monkeypatch):
    target = tmp_path / "a file"
    target.write_text("in the way", encoding="utf-8")
    monkeypatch.setenv("ZIPCCL_CACHE_DIR", str(target / "cache"))
    monkeypatch.setattr(jit, "compile_kernels", lambda stem, arch: jit.Compiled(b"cubin", {}, "none", "none"))
    assert jit.cached_cubin("stats", "sm_90") == b"cubin"


def test_warm_compiles_every_stem_for_every_architecture(tmp_path, monkeypatch):
    monkeypatch.setenv("ZIPCCL_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(jit, "compile_kernels", lambda stem, arch: jit.Compiled(b"cubin", {}, "none", "none"))
    assert len(jit.warm(jit.ARCHITECTURES)) == len(jit.STEMS) * len(jit.ARCHITECTURES)


def test_doctor_warms_the_cache_and_says_what_there_is(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("ZIPCCL_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(jit, "compile_kernels", lambda stem, arch: jit.Compiled(b"cubin", {}, "none", "none"))
    assert cli.main(["doctor", "--warm", "--arch", "sm_90"]) == 0
    said = capsys.readouterr().out
    assert "encode sm_90: 5 bytes" in said
    assert str(tmp_path) in said
    assert len(list(tmp_path.iterdir())) == len(jit.STEMS)


def test_doctor_tells_an_error_in_one_line(monkeypatch, capsys):
    def refuse(architectures):
        raise jit.CompilerError("no compiler")

    monkeypatch.setattr(jit, "warm", refuse)
    assert cli.main(["doctor", "--warm", "--arch", "sm_90"]) == 1
    assert capsys.readouterr().err == "zipccl doctor: no compiler\n"


# --- The record of the last run on a GPU ------------------------------------------------------------------------------


def test_the_record_is_of_these_kernels_and_all_passed():
    assert record.problems() == []


def test_a_changed_kernel_makes_the_record_stale(tmp_path, monkeypatch):
    kernels = tmp_path / "cuda"
    kernels.mkdir()
    for path in record.KERNELS.iterdir():
        if path.suffix in record.SUFFIXES:
            (kernels / path.name).write_bytes(path.read_bytes())
    before = record.sources_sha256()
    monkeypatch.setattr(record, "KERNELS", kernels)
    assert record.sources_sha256() == before
    source = kernels / "decode.cu"
    text = source.read_text(encoding="utf-8")
    source.write_text("// only a comment\n" + text, encoding="utf-8")
    assert record.sources_sha256() == before
    source.write_text(text.replace("digest +=", "digest -=", 1), encoding="utf-8")
    assert record.sources_sha256() != before
    assert any("run `python -m conformance.record`" in p for p in record.problems())


def test_a_record_with_a_failure_or_without_a_run_is_a_problem(tmp_path, monkeypatch):
    runs = [{"name": "white-box", "verdict": "FAIL"}]
    content = f'{{"sources_sha256": "{record.sources_sha256()}", "runs": {str(runs).replace(chr(39), chr(34))}}}'
    (tmp_path / "codec_none.json").write_text(content, encoding="utf-8")
    monkeypatch.setattr(record, "RECORDS", tmp_path)
    found = record.problems()
    assert "codec_none.json: white-box: FAIL" in found
    assert any("compute-sanitizer memcheck did not run" in p for p in found)
    monkeypatch.setattr(record, "RECORDS", Path(tmp_path / "empty"))
    assert "has no codec_*.json" in record.problems()[0]
