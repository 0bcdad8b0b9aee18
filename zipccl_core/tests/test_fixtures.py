"""fixtures/tensors/ is what its manifest says, its loader trusts nothing, and the training behind it is sound."""

from __future__ import annotations

import ast
import dataclasses
import json
import math
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from fixtures import capture, tensors

TINY = capture.Config(
    vocabulary_rows=512,
    width=32,
    heads=2,
    feed_forward=64,
    experts=4,
    expert_width=32,
    context_tokens=16,
    sequences=4,
    warmup_steps=1,
    record_steps=(1, 2, 3),
)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.int16 if tensor.dtype == torch.bfloat16 else torch.int32)


def low_halves(tensor: torch.Tensor) -> torch.Tensor:
    return bits(tensor) & 0xFFFF


def top_halves(tensor: torch.Tensor) -> torch.Tensor:
    return (bits(tensor) >> 16).to(torch.int16)


def zero_rows(tensor: torch.Tensor) -> torch.Tensor:
    return (bits(tensor) & (0x7FFF if tensor.dtype == torch.bfloat16 else 0x7FFFFFFF)).eq(0).all(1)


# The stored tensors


@pytest.mark.parametrize("name", tensors.names())
def test_tensor_is_what_the_manifest_says(name: str) -> None:
    entry, tensor = tensors.describe(name), tensors.load(name)
    assert tensors.tensor_sha256(tensor) == entry["sha256"]
    assert tensor.dim() == 2
    assert tensor.is_contiguous()
    assert tensor.numel() >= 16 * 1024
    assert torch.isfinite(tensor).all()
    assert name.startswith(f"step{entry['step']:03d}.")
    start, stop, rows = entry["rows"]
    assert (start, stop - start) == (0, entry["shape"][0])
    assert rows * entry["shape"][1] == math.prod(entry["full_shape"])

    magnitude = bits(tensor) & (0x7FFF if tensor.dtype == torch.bfloat16 else 0x7FFFFFFF)
    assert entry["zero_share"] == pytest.approx(magnitude.eq(0).double().mean().item(), abs=1e-12)
    assert entry["zero_row_share"] == pytest.approx(zero_rows(tensor).double().mean().item(), abs=1e-12)
    nonzero = tensor.double()[magnitude != 0]
    assert entry["sigma"] == pytest.approx(math.sqrt((nonzero**2).sum().item() / nonzero.numel()), rel=1e-9)
    if tensor.dtype == torch.float32:
        share = low_halves(tensor).eq(0).double().mean().item()
        assert entry["zero_low_half_share"] == pytest.approx(share, abs=1e-12)
    else:
        assert "zero_low_half_share" not in entry


def test_every_kind_is_present_and_has_its_dtype() -> None:
    found = tensors.by_kind()
    assert list(found) == list(tensors.KINDS)
    assert sorted(name for members in found.values() for name in members) == sorted(tensors.names())
    wide = {"gradient_widened", "gradient_accumulated", "optimizer_state"}
    for kind, members in found.items():
        assert members
        for name in members:
            assert tensors.describe(name)["dtype"] == ("float32" if kind in wide else "bfloat16"), name


def test_files_are_those_of_the_manifest_and_small_enough() -> None:
    files = {path.name: path.stat().st_size for path in tensors.TENSORS.iterdir()}
    assert sum(files.values()) <= capture.MAX_TENSORS_BYTES == 4 << 20
    del files["manifest.json"]
    assert files == {name: entry["bytes"] for name, entry in tensors.manifest()["files"].items()}


def test_low_halves_are_zero_exactly_where_claimed() -> None:
    found = tensors.by_kind()
    for name in found["gradient_widened"]:
        assert not low_halves(tensors.load(name)).any(), name
    for name in found["gradient_accumulated"]:
        tensor = tensors.load(name)
        shares = low_halves(tensor)[~zero_rows(tensor)].ne(0).double().mean().item()
        # Most tokens occur in one micro-batch of the two only: most rows of an embedding's sum have one term.
        assert shares > (0.0 if "embedding" in name else 0.5), (name, shares)
    for name in found["optimizer_state"]:
        assert low_halves(tensors.load(name)).ne(0).double().mean() > 0.9, name


def test_widened_gradient_is_the_gradient_and_zeros() -> None:
    compared = 0
    for name in tensors.by_kind()["gradient_widened"]:
        narrow = name.replace("gradient_widened", "gradient")
        if narrow in tensors.names():
            assert torch.equal(top_halves(tensors.load(name)), bits(tensors.load(narrow))), name
            compared += 1
    assert compared >= 3


def test_embedding_gradient_has_untouched_and_touched_rows() -> None:
    for name in tensors.by_kind()["embedding_gradient"]:
        share = zero_rows(tensors.load(name)).double().mean().item()
        assert 0.5 < share < 1, (name, share)


@pytest.mark.parametrize("kind", ["moe_dispatch", "moe_combine", "moe_dispatch_gradient", "moe_combine_gradient"])
def test_padding_of_the_expert_buffers_ends_each_expert(kind: str) -> None:
    config = tensors.manifest()["config"]
    for name in tensors.by_kind()[kind]:
        entry = tensors.describe(name)
        padding = zero_rows(tensors.load(name))
        assert padding.any(), name
        capacity_rows = entry["rows"][2] // config["experts"]
        for expert in padding.split(capacity_rows):
            assert torch.equal(expert, expert.cummax(0).values), name


def test_relu_output_is_about_half_zeros_and_never_negative() -> None:
    relu = [name for name in tensors.names() if name.endswith("relu_out")]
    assert relu
    for name in relu:
        assert 0.3 < tensors.describe(name)["zero_share"] < 0.9, name
        assert (bits(tensors.load(name)) >= 0).all(), name


def test_the_loss_went_down_below_the_entropy_of_single_tokens() -> None:
    loss = tensors.manifest()["loss"]
    config = tensors.manifest()["config"]
    assert loss["first"] == pytest.approx(math.log(config["vocabulary_rows"]), rel=0.03)
    assert loss["last"] < loss["unigram_entropy"] - 0.5
    assert loss["last_10_mean"] < loss["unigram_entropy"] - 0.5


# The loader


@pytest.fixture
def copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    folder = tmp_path / "tensors"
    shutil.copytree(tensors.TENSORS, folder)
    caches = (tensors.manifest, tensors._file)
    monkeypatch.setattr(tensors, "TENSORS", folder)
    for cached in caches:
        cached.cache_clear()
    yield folder
    for cached in caches:
        cached.cache_clear()


def test_a_missing_file_is_an_error(copied: Path) -> None:
    (copied / "step050.safetensors").unlink()
    with pytest.raises(tensors.FixtureError, match=r"step050\.safetensors cannot be read"):
        tensors.load("step050.layer1.moe_dispatch")


def test_one_flipped_bit_is_an_error(copied: Path) -> None:
    path = copied / "step050.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(tensors.FixtureError, match=r"SHA-256 of step050\.safetensors must be"):
        tensors.load("step050.layer1.moe_dispatch")


@pytest.mark.parametrize(("field", "value"), [("sha256", "0" * 64), ("dtype", "float32"), ("shape", [1, 1])])
def test_a_tensor_that_differs_from_its_entry_is_an_error(copied: Path, field: str, value: object) -> None:
    name = "step050.layer1.moe_dispatch"
    content = json.loads((copied / "manifest.json").read_text())
    content["tensors"][name][field] = value
    (copied / "manifest.json").write_text(json.dumps(content))
    with pytest.raises(tensors.FixtureError, match=f"{field} of {name} must be"):
        tensors.load(name)


def test_a_missing_manifest_is_an_error(copied: Path) -> None:
    (copied / "manifest.json").unlink()
    with pytest.raises(tensors.FixtureError, match="no readable manifest"):
        tensors.names()


def test_an_unknown_name_is_an_error() -> None:
    with pytest.raises(tensors.FixtureError, match="no tensor is named"):
        tensors.load("step050.nothing")


def test_a_kind_without_a_tensor_is_an_error(copied: Path) -> None:
    content = json.loads((copied / "manifest.json").read_text())
    content["tensors"] = {n: e for n, e in content["tensors"].items() if e["kind"] != "weight"}
    (copied / "manifest.json").write_text(json.dumps(content))
    with pytest.raises(tensors.FixtureError, match="no tensor is of the kinds"):
        tensors.by_kind()


def test_loaded_tensors_are_the_callers_own() -> None:
    name = tensors.names()[0]
    tensors.load(name).zero_()
    assert tensors.tensor_sha256(tensors.load(name)) == tensors.describe(name)["sha256"]


def test_the_loader_imports_neither_zipccl_nor_the_training_code() -> None:
    tree = ast.parse(Path(tensors.__file__).read_text())
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    imported |= {f"{'.' * n.level}{n.module or ''}" for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
    ours = {"__future__", "hashlib", "json", "functools", "pathlib", "typing"}
    assert {name.partition(".")[0] for name in imported} - ours == {"torch", "safetensors"}


# The training


@pytest.fixture(scope="module")
def tiny_tokens() -> torch.Tensor:
    return capture.tokenize(capture.read_text()[0][:40_000], TINY.vocabulary_rows)


@pytest.fixture(scope="module")
def tiny_run(tiny_tokens: torch.Tensor) -> capture.Run:
    return capture.train(TINY, tiny_tokens)


def test_three_steps_produce_what_is_wanted(tiny_run: capture.Run) -> None:
    assert {item.entry["kind"] for item in tiny_run.captured} == set(tensors.KINDS)
    assert len(tiny_run.captured) == sum(len(steps) for _, _, steps, _ in capture.WANTED)
    assert len(tiny_run.losses) == 3
    recorded = {name.removeprefix(f"step{entry['step']:03d}.") for name, entry in tensors.manifest()["tensors"].items()}
    assert {item.name.partition(".")[2] for item in tiny_run.captured} == recorded
    for item in tiny_run.captured:
        kind = item.entry["kind"]
        if kind == "gradient_widened":
            assert not low_halves(item.tensor).any()
        if kind == "gradient_accumulated":
            assert low_halves(item.tensor).any()
        if kind == "embedding_gradient":
            assert 0 < zero_rows(item.tensor).double().mean() < 1
        if kind.startswith("moe_"):
            assert 0 < zero_rows(item.tensor).double().mean() < 1


def test_training_again_gives_the_same_bits(tiny_run: capture.Run, tiny_tokens: torch.Tensor) -> None:
    again = capture.train(TINY, tiny_tokens)
    assert again.losses == tiny_run.losses
    assert [c.entry["sha256"] for c in again.captured] == [c.entry["sha256"] for c in tiny_run.captured]


def test_another_seed_gives_other_bits(tiny_run: capture.Run, tiny_tokens: torch.Tensor) -> None:
    other = capture.train(dataclasses.replace(TINY, seed=1), tiny_tokens)
    assert other.losses != tiny_run.losses


def test_capture_writes_what_the_loader_reads(tiny_run: capture.Run, copied: Path) -> None:
    for path in copied.iterdir():
        path.unlink()
    for name, content in capture.build(TINY, tiny_run, {"source": "test"}, 1.0).items():
        (copied / name).write_bytes(content)
    assert tensors.names() == [item.name for item in tiny_run.captured]
    for item in tiny_run.captured:
        assert torch.equal(bits(tensors.load(item.name)), bits(item.tensor)), item.name


def test_a_mixture_with_room_for_all_is_the_gated_sum_of_its_experts() -> None:
    config = dataclasses.replace(TINY, capacity_factor=float(TINY.experts))
    torch.manual_seed(0)
    mixture = capture.MixtureOfExperts(config)
    for parameter in mixture.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    x = torch.randn(2, 8, config.width)
    with torch.no_grad():
        came = mixture(x, lambda name, tensor: None)
        probabilities = mixture.router(x).softmax(-1)
        top, chosen = probabilities.topk(config.top_k)
        wanted = torch.full_like(x, torch.nan)
        for i in range(2):
            for j in range(8):
                terms = []
                for share, expert in zip(top[i, j], chosen[i, j], strict=True):
                    gate, value = (x[i, j] @ mixture.up[expert]).chunk(2)
                    terms.append(share / top[i, j].sum() * ((F.gelu(gate) * value) @ mixture.down[expert]))
                wanted[i, j] = sum(terms)
    torch.testing.assert_close(came, wanted)


def test_tokens_beyond_the_capacity_are_dropped_and_the_buffer_is_full() -> None:
    config = dataclasses.replace(TINY, capacity_factor=0.25)
    torch.manual_seed(0)
    mixture = capture.MixtureOfExperts(config)
    for parameter in mixture.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    taps: dict[str, torch.Tensor] = {}
    with torch.no_grad():
        out = mixture(torch.randn(4, 16, config.width), taps.__setitem__)
    dispatch = taps["moe_dispatch"]
    assert dispatch.shape == (4 * 8, config.width)  # ceil(0.25 · 2 · 64 / 4) = 8 slots an expert
    assert not zero_rows(dispatch).any()
    assert zero_rows(out.flatten(0, 1)).sum() >= 64 - 32
