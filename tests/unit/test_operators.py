"""The compiled operators compute the bits of torch's calls, and a start does without them."""

import logging
import os
import shutil
from pathlib import Path

import psutil
import pytest
import torch
from torch.nn.functional import gelu, silu

from engine.attention import cpu, dense
from engine.attention.agreement import operator_agrees
from engine.attention.cpu import CpuAttention
from engine.attention.dense import padded_keys
from engine.operators import library
from engine.operators.library import Operators
from tests.patience import PATIENCE_S, until
from tiers.blocks.layout import BlockLayout, LayerLayout

WIDTHS = (16, 72, 576, 1536, 4096, 16384)
ROWS = (1, 2, 37, 200)
EPS = torch.tensor(1e-5, dtype=torch.float64)


def test_norms_and_activations_have_torchs_bits(operators):
    random = torch.Generator().manual_seed(0)
    for width in WIDTHS:
        for rows in ROWS:
            x, y = torch.randn(2, 1, rows, width, generator=random)
            normed = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS)
            assert torch.equal(torch.ops.cachesvc.norm(x, EPS), normed), (width, rows)
            if width % 32 == 0:  # torch computes the last numbers of others one by one
                assert torch.equal(torch.ops.cachesvc.silu_mul(x, y), silu(x) * y), (width, rows)
                activated = gelu(x, approximate="tanh") * y
                assert torch.equal(torch.ops.cachesvc.gelu_mul(x, y), activated), (width, rows)


@pytest.mark.parametrize("dim", [16, 72, 256])
def test_norms_of_rows_that_lie_apart_have_torchs_bits(operators, dim):
    """As those of heads, and of halves of a product. What heads give lies in memory as they do."""
    random = torch.Generator().manual_seed(0)
    for heads in (1, 4):
        for tokens in ROWS:
            stored = torch.randn(1, tokens, heads, 2 * dim, generator=random)
            half = stored[..., dim:]
            for x in (stored.transpose(1, 2), half, half.transpose(1, 2), half[:, :, 0]):
                expected = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS)
                normed = torch.ops.cachesvc.norm(x, EPS)
                assert torch.equal(normed, expected), (heads, tokens, x.stride())
                for axes in ((0, 1), (1, 2)):
                    one, other = (each.transpose(*axes) for each in (normed, expected))
                    assert one.is_contiguous() == other.is_contiguous()


@pytest.mark.parametrize("dim", [16, 64, 80, 128])
def test_a_rotation_has_torchs_bits(operators, dim):
    random = torch.Generator().manual_seed(0)
    for heads in (1, 9):
        for tokens in ROWS:
            x = torch.randn(1, tokens, heads, dim, generator=random).transpose(1, 2)
            cos, sin = torch.randn(2, 1, 1, tokens, dim, generator=random)
            half = torch.cat((-x[..., dim // 2 :], x[..., : dim // 2]), -1)
            rotated = torch.ops.cachesvc.rotate(x, cos, sin)
            assert torch.equal(rotated, x * cos + half * sin), (heads, tokens)


@pytest.mark.parametrize("dim", [16, 32, 64, 80, 96, 128, 192])
def test_attention_has_the_bits_of_dense(operators, dim):
    assert operator_agrees(dim)


@pytest.mark.parametrize("window", [None, 900])
@pytest.mark.parametrize("tokens", [1, 2])
def test_threads_that_share_a_heads_keys_attend_as_one_does(operators, tokens, window, threads):
    random = torch.Generator().manual_seed(tokens)
    for start in (767, 768, 1343, 2500):
        run = torch.randn(2, 3, padded_keys(start + tokens), 64, generator=random)
        key, value = torch.randn(2, tokens, 3, 64, generator=random)
        query = torch.randn(tokens, 9, 64, generator=random)
        attended = []
        for num_threads in (1, 2, 4):
            threads(num_threads)
            output = torch.full_like(query, torch.nan)
            call = (query, key, value, 0, tokens, True, [run.clone()], [start], 0, 1)
            torch.ops.cachesvc.attend_rows(*call, window, 0.125, output)
            attended.append(output)
        assert all(torch.equal(attended[0], other) for other in attended[1:]), start


def test_weights_of_far_keys_have_torchs_bits_down_to_zero(operators):
    far = torch.linspace(0, 110, 500)
    scores = torch.full((len(far), 16), -torch.inf)
    scores[:, 0], scores[:, 1] = 0, -far
    run = torch.zeros(len(far), 2, 1, 16, 16)
    run[:, 0, 0, 1, 0] = -far
    run[:, 1, 0, 1] = 1e38  # beside a value of 0
    query = torch.zeros(len(far), 1, 16)
    query[:, 0, 0] = 1
    key, value = run[:, 0, :, 1], run[:, 1, :, 1]
    output = torch.empty_like(query)
    torch.ops.cachesvc.attend_rows(
        *(query, key, value, 0, 1, True, list(run), [1] * len(far), 0, 1, None, 1.0, output)
    )
    weights = scores.softmax(-1)[:, 1]
    assert 0 < weights[450] < torch.finfo(torch.float32).tiny and weights[-1] == 0
    assert torch.equal(output[:, 0, 0], weights * 1e38)


@pytest.mark.parametrize(("dims", "heads"), [((64,), [64]), ((72,), []), ((64, 256), [64])])
def test_heads_that_the_operator_does_not_attend_are_left_to_dense(
    operators, dims, heads, monkeypatch
):
    """As wide ones are where a library adds up their products in parts."""
    monkeypatch.setattr(cpu, "operator_agrees", lambda dim: dim < 256)
    layers = [LayerLayout(2, dim, dim) for dim in dims]
    pool = torch.zeros(4, *BlockLayout(tuple(layers), 16, "float32").shape)
    attention = CpuAttention(pool, layers)
    attention.fuse()
    assert attention._heads == heads


@pytest.mark.parametrize("name", ["_attend_tokens", "_attend_span"])
def test_attention_that_sums_in_another_order_does_not_agree(name, operators, monkeypatch, caplog):
    monkeypatch.setattr(dense, name, _in_doubles)
    assert not operator_agrees(64)
    layers = [LayerLayout(2, 64, 64)]
    pool = torch.zeros(4, *BlockLayout(tuple(layers), 16, "float32").shape)
    attention = CpuAttention(pool, layers)
    with caplog.at_level(logging.INFO):
        attention.fuse()
    assert not attention._heads
    assert "the compiled attention is not used for heads of 64: other bits" in caplog.text


def _in_doubles(call, part, _place, _tools, output):
    positions = part.positions or range(part.start, part.start + part.num_rows)
    runs = part.runs if part.positions else part.runs * part.num_rows
    for number, (run, position) in enumerate(zip(runs, positions, strict=True)):
        run[:, :, position] = torch.stack([call.key[number], call.value[number]])
        keys, values = run[:, :, : position + 1].double()
        query = call.query[number].double().unflatten(0, (len(keys), -1)) * call.options.scaling
        output[number] = ((query @ keys.mT).softmax(-1) @ values).flatten(0, 1)
    return output


def test_a_call_that_an_operator_cannot_compute_is_refused(operators):
    with pytest.raises(RuntimeError, match="not float32"):
        torch.ops.cachesvc.norm(torch.zeros(2, 4, dtype=torch.float64), EPS)
    with pytest.raises(RuntimeError, match="rows with gaps"):
        torch.ops.cachesvc.norm(torch.zeros(4, 2).t(), EPS)
    run, rows = torch.zeros(2, 1, 32, 16), torch.zeros(3, 1, 16)
    for tokens, position, expected in (
        (1, 31, None),
        (3, 29, None),
        (1, 32, "another run"),
        (3, 30, "another run"),
        (4, 0, "another output"),
    ):
        call = (rows, rows, rows, 0, tokens, True, [run], [position], 0, 1, None, 1.0, rows.clone())
        if expected is None:
            torch.ops.cachesvc.attend_rows(*call)
        else:
            with pytest.raises(RuntimeError, match=expected):
                torch.ops.cachesvc.attend_rows(*call)


def test_blocks_are_copied_whole(operators):
    random = torch.Generator().manual_seed(0)
    sizes = (1, 63, 64, 1000, (1 << 18) + 64, 3 << 18)
    sources = [torch.randint(0, 256, (n,), generator=random, dtype=torch.uint8) for n in sizes]
    targets = [torch.zeros(n + 1, dtype=torch.uint8)[n % 2 : n + n % 2] for n in sizes]
    torch.ops.cachesvc.copy([*targets], [*sources])
    assert all(torch.equal(one, other) for one, other in zip(targets, sources, strict=True))
    for source in (torch.zeros(2), torch.zeros(6)[::2]):
        with pytest.raises(RuntimeError, match="other sizes"):
            torch.ops.cachesvc.copy([torch.zeros(3)], [source])


def test_the_library_is_kept_and_a_damaged_one_compiled_again(operators, tmp_path, caplog):
    copied = Path(shutil.copy(operators.kept, tmp_path))
    assert Operators(tmp_path)._compiling is None, "the kept library is for this machine"
    copied.write_bytes(operators.kept.read_bytes()[:1000])
    again = Operators(tmp_path)
    assert "damaged" in caplog.text
    assert not copied.exists()
    assert again._compiling is not None
    assert again.load(patience_s=None) and not again.is_compiling
    assert again.kept is not None


def test_a_start_takes_what_was_compiled_with_its_environment(operators, tmp_path, caplog):
    built = tmp_path / "built"
    built.mkdir()
    copied = Path(shutil.copy(operators.kept, built))
    start = Operators(tmp_path / "models", built)
    assert start._compiling is None and copied == start.kept and start.load()
    copied.write_bytes(operators.kept.read_bytes()[:1000])
    assert Operators(tmp_path / "models", built)._compiling is not None
    assert "damaged" in caplog.text and copied.exists(), "it may be another user's"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives a folder away")
def test_an_environment_of_another_user_is_as_one_that_has_compiled_nothing(operators, tmp_path):
    """As where a service runs as another user than who installed it."""
    built = tmp_path / "built"
    built.mkdir()
    os.chown(shutil.copy(operators.kept, built), 12345, -1)
    os.chown(built, 12345, -1)
    start = Operators(tmp_path / "models", built)
    assert start.missing is None and start.is_compiling
    start.close()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda kept: kept.chmod(0o722), "is not this user's alone; delete it"),
        (lambda kept: kept.parent.chmod(0o777), "other users may replace what is in"),
        pytest.param(
            lambda kept: os.chown(kept.parent, 12345, -1),
            "other users may replace what is in",
            marks=pytest.mark.skipif(os.geteuid() != 0, reason="only root gives a folder away"),
        ),
        (lambda kept: kept.parent.chmod(0o1777), None),
        (lambda kept: kept.parent.chmod(0o700), None),
    ],
    ids=["file", "folder of all users", "another user's folder", "sticky folder", "own folder"],
)
def test_a_library_that_others_may_write_is_not_loaded(change, said, operators, tmp_path, caplog):
    """A node keeps it on its first disk, which may be in a folder such as /tmp."""
    copied = Path(shutil.copy(operators.kept, tmp_path))
    change(copied)
    with caplog.at_level(logging.INFO):
        assert (said is None) == Operators(tmp_path).load()
    assert said is None or said in caplog.text
    assert copied.exists()


def test_a_library_that_the_system_does_not_load_is_said_with_its_reason(
    operators, tmp_path, caplog
):
    """As in a file system mounted noexec."""
    other = tmp_path / "other.so"
    other.write_bytes(b"of another machine")
    kept = tmp_path / f"{library._stem(operators._name, other)}.so"
    other.rename(kept)
    kept.chmod(0o700)
    with caplog.at_level(logging.INFO):
        assert not Operators(tmp_path).load()
    assert f"no compiled operators: {kept}: file too short" in caplog.text


@pytest.mark.parametrize("folder", ["a file", "/proc/nowhere"])
def test_a_start_does_without_a_folder_to_keep_operators(folder, operators, tmp_path, caplog):
    (tmp_path / "a file").touch()
    with caplog.at_level(logging.INFO):
        assert not Operators(tmp_path / folder).load()
    assert "no compiled operators" in caplog.text


@pytest.mark.parametrize(
    ("compiler", "reason"),
    [
        ("", "no C++ compiler"),
        ("echo 'x.cpp:1: error: no such header' >&2; exit 1", "no such header"),
        ("exit 0", "No such file"),
        ("exit 1", "it says nothing, as on a full disk"),
    ],
)
def test_a_start_does_without_a_compiler_that_fails(
    compiler, reason, tmp_path, monkeypatch, caplog
):
    folder = _models(tmp_path, monkeypatch, compiler)
    with caplog.at_level(logging.INFO):
        assert not Operators(folder).load()
    assert reason in caplog.text
    assert not list(folder.iterdir()), "nothing is left behind"


def test_a_start_does_not_wait_for_a_slow_compiler_whose_work_serves_the_next(
    operators, tmp_path, monkeypatch, caplog
):
    go = tmp_path / "go"
    folder = _models(tmp_path, monkeypatch, _compiler_that_waits(go, operators))
    first = Operators(folder)
    with caplog.at_level(logging.INFO):
        assert not first.load(patience_s=0.1)
    assert "the C++ compiler is at work after 0 s, and a later start loads" in caplog.text
    assert first.kept is None and first.is_compiling
    go.touch()
    first._compiling.wait(PATIENCE_S)
    assert [first.kept] == list(folder.iterdir())
    second = Operators(folder)
    assert second._compiling is None
    assert second.load()


@pytest.mark.parametrize("closed", [True, False])
def test_a_compiler_ends_with_its_children_when_nobody_waits(closed, tmp_path, monkeypatch, caplog):
    folder = _models(tmp_path, monkeypatch, f"sleep 600 & echo $! > {tmp_path}/child; wait")
    compiling = Operators(folder)
    child = _child_of(tmp_path)
    if closed:
        compiling.close()
        with caplog.at_level(logging.INFO):
            assert not compiling.load(patience_s=None)
        assert "the C++ compiler was ended at its work" in caplog.text
    else:
        del compiling
    until(lambda: not psutil.pid_exists(child))
    assert not list(folder.iterdir())


def test_what_a_killed_start_was_compiling_is_removed_by_the_next(operators, tmp_path, monkeypatch):
    folder = _models(tmp_path, monkeypatch, "exit 1")
    left = folder / f".{operators._name}-left"
    left.mkdir()
    (left / "operators.so").write_bytes(b"half")
    Operators(folder).load()
    assert not left.exists()


def test_two_starts_that_compile_at_once_both_load(operators, tmp_path, monkeypatch):
    go = tmp_path / "go"
    folder = _models(tmp_path, monkeypatch, _compiler_that_waits(go, operators))
    both = [Operators(folder) for _ in range(2)]
    go.touch()
    assert all(each.load(PATIENCE_S) for each in both)
    assert [both[0].kept] == list(folder.iterdir()), "the same source gives the same library"


def _compiler_that_waits(go, operators):
    """Once `go` exists, it makes the library that `operators` has, at its last argument."""
    wait = f"while [ ! -e {go} ]; do sleep 0.05; done"
    return f'{wait}; for made; do :; done; cp {operators.kept} "$made"'


def _models(tmp_path, monkeypatch, compiler):
    """An empty folder, on a machine whose compiler is this script of a shell; "": none."""
    if torch.backends.cpu.get_cpu_capability() not in library._FLAGS:
        pytest.skip("there are no operators for this processor")
    program = tmp_path / "c++"
    if compiler:
        program.write_text(f"#!/bin/sh\n{compiler}\n")
        program.chmod(0o755)
    monkeypatch.setattr(library, "COMPILERS", (str(program),))
    folder = tmp_path / "models"
    folder.mkdir()
    return folder


def _child_of(tmp_path):
    """The number of the process that a compiler's script has written down and waits for."""
    written = tmp_path / "child"
    until(lambda: written.exists() and written.read_text() != "")
    child = int(written.read_text())
    assert psutil.pid_exists(child)
    return child
