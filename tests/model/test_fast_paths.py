"""Fast paths are tried, never believed in: the next one stands in; the default model is converted once."""

import json
import os
import signal
import subprocess
import sys

import pytest
import torch

from specscope import Engine, SamplingParams
from specscope.errors import UserError
from specscope.kernels.cpu import tiles
from specscope.model import places as bundled
from specscope.model.fast import linear
from specscope.model.fast.linear import (
    FEW,
    NAMES,
    PATHS,
    VARIABLE,
    PackedLinear,
    compiled_rows,
    disabled,
    failure,
    is_half,
    usable,
)
from tests.fast_paths import machine_without, without
from tests.waiting import HANG_SECONDS, until


@without
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_missing_is_not_used_and_the_rest_is(how, names, dtype):
    there = usable(dtype)
    with machine_without(how, names):
        assert usable(dtype) == [name for name in there if name not in names]


def test_a_path_that_gives_other_numbers_is_not_used(monkeypatch):
    reorder = torch.ops.mkldnn._reorder_linear_weight
    monkeypatch.setattr(torch.ops.mkldnn, "_reorder_linear_weight", lambda weight: reorder(weight * 1.01))
    linear.failure.cache_clear()
    assert failure("onednn", torch.float32) == "its results differ"
    monkeypatch.undo()
    linear.failure.cache_clear()


def test_an_unknown_name_is_refused(monkeypatch):
    monkeypatch.setenv(VARIABLE, "onednn,avx")
    with pytest.raises(UserError, match=r"SPECSCOPE_DISABLE: unknown fast path 'avx': use numba, onednn, fuse"):
        disabled()
    monkeypatch.setenv(VARIABLE, " OneDNN , fuse,")
    assert disabled() == {"onednn", "fuse"}
    monkeypatch.setenv(VARIABLE, ",".join(NAMES))
    assert not usable(torch.float32)


LESSER = """
import json, sys, torch
from specscope import Engine, SamplingParams
from specscope.model.fast.linear import usable
for dtype in ("float32", "bfloat16", "auto"):
    engine = Engine(target=sys.argv[1], dtype=dtype, kv_memory=0.01, threads=1)
    (result,) = engine.generate(["abcabc"], SamplingParams(max_tokens=12, ignore_eos=True))
    engine.close()
    print(json.dumps([dtype, engine.run_info.dtype, usable(torch.bfloat16), result.token_ids]))
"""


@pytest.mark.slow
@pytest.mark.parametrize(("isa", "refuses"), [("SSE41", True), ("AVX2", True), ("AVX512_CORE", False)])
def test_on_lesser_processors(isa, refuses, tiny):
    """oneDNN told that it is on an older one: its bfloat16 layout raises there, or is emulated before AVX512-BF16."""
    environment = {**os.environ, "ONEDNN_MAX_CPU_ISA": isa}
    command = [sys.executable, "-c", LESSER, str(tiny)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)
    assert done.returncode == 0, done.stderr
    plain, wide, auto = (json.loads(line) for line in done.stdout.splitlines())
    assert [plain[1], wide[1], auto[1]] == ["float32", "bfloat16", "float32"], "auto takes what is computed in"
    assert not (refuses and "onednn" in wide[2])
    assert auto[3] == plain[3] == greedy(tiny, "float32")
    assert len(wide[3]) == 12


PROCESSORS = {  # with tiles, with pairs, with bfloat16 arithmetic at all
    "AVX2": (False, False, False),
    "AVX-512": (False, True, True),
    "AMX": (True, True, True),
    "Arm": (False, False, True),
}


@pytest.fixture(params=PROCESSORS)
def lacks(request, monkeypatch):
    """Whether the processor has instructions for bfloat16 that our own kernels lack."""
    if not {"numba", "onednn"} <= {*usable(torch.bfloat16)}:
        pytest.skip("there are not two paths")
    tiled, paired, arithmetic = PROCESSORS[request.param]
    monkeypatch.setattr(tiles, "TILED", tiled)
    monkeypatch.setattr(tiles, "PAIRED", paired)
    monkeypatch.setattr(linear, "has_bfloat16", lambda: arithmetic)
    return request.param in ("AMX", "Arm")


def test_our_own_kernels_take_all_rows_unless_a_library_has_better_instructions_for_many(lacks, monkeypatch):
    assert compiled_rows(torch.bfloat16) == (FEW if lacks else sys.maxsize)
    assert compiled_rows(torch.float32) == sys.maxsize
    taken = []

    def noted(name, lay_out):
        def noting(weight, bias):
            product = lay_out(weight, bias)
            return lambda x: (taken.append(name), product(x))[1]

        return noting

    for name, lay_out in PATHS.items():
        monkeypatch.setitem(PATHS, name, noted(name, lay_out))
    layer = torch.nn.Linear(48, 64, bias=False).requires_grad_(False)
    layer.weight.copy_(torch.randint(-8, 8, (64, 48)) / 8)  # which all formats hold
    layer.bfloat16()
    packed = PackedLinear([layer], pack=True)
    for rows in (1, FEW, FEW + 1, 40):
        x = torch.randn(rows, 48).bfloat16()
        assert linear.same_numbers(torch.nn.functional.linear(x, layer.weight), packed(x))
    assert taken == ["numba", "numba", *(["onednn"] if lacks else ["numba"]) * 2]


def greedy(folder, dtype):
    engine = Engine(target=str(folder), dtype=dtype, kv_memory=0.01, threads=1)
    (result,) = engine.generate(["abcabc"], SamplingParams(max_tokens=12, ignore_eos=True))
    engine.close()
    return result.token_ids


def test_weights_published_in_bfloat16_are_kept_in_16_bits():
    """Their smallest numbers lose digits in float16, which no product shows. Weights trained in float32 lose more."""
    generator = torch.Generator().manual_seed(0)
    trained = torch.randn(256, 576, generator=generator) * 0.03
    published = trained.bfloat16().float()
    assert not torch.equal(published.half().float(), published)
    assert is_half(published)
    assert not is_half(trained)
    assert not is_half(torch.full((4, 64), 1e6))


# A start whose conversion lasts until its standard input is closed.
START = """
import sys
from pathlib import Path
from specscope.model import places as bundled
def convert(source, folder):
    (folder / "half").touch()
    sys.stdin.read()  # until it is closed
    (folder / "config.json").write_text("{}")
bundled.convert_gguf = convert
print("at", bundled.bundled_model(lambda text: print(text, flush=True)), flush=True)
"""


def start(folder, *, held):
    environment = {**os.environ, "XDG_CACHE_HOME": str(folder)}
    command = [sys.executable, "-c", START]
    pipe, given = subprocess.PIPE, subprocess.PIPE if held else subprocess.DEVNULL
    return subprocess.Popen(command, stdin=given, stdout=pipe, stderr=pipe, text=True, env=environment)


def models(folder):
    return folder / "specscope" / "models"


def test_starts_at_the_same_time_all_have_it(tmp_path):
    starts = [start(tmp_path, held=True) for _ in range(3)]
    until(lambda: len(list(models(tmp_path).glob(".convert-*/half"))) == 3)
    outs = [process.communicate("", timeout=HANG_SECONDS) for process in starts]
    assert [process.returncode for process in starts] == [0, 0, 0], outs
    assert "".join(out for out, _ in outs).count(f"at {models(tmp_path)}") == 3
    assert [p.name for p in models(tmp_path).iterdir()] == [bundled.converted_folder().name]


@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_killed_conversion_blocks_nobody(tmp_path, sign):
    killed = start(tmp_path, held=True)
    until(lambda: list(models(tmp_path).glob(".convert-*/half")))
    killed.send_signal(sign)
    killed.communicate(timeout=HANG_SECONDS)
    out, error = start(tmp_path, held=False).communicate(timeout=HANG_SECONDS)
    assert f"at {models(tmp_path)}" in out, error


def test_a_cache_that_cannot_be_written_is_named(tmp_path, monkeypatch):
    (tmp_path / "cache").write_text("a file")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with pytest.raises(UserError, match=r"cannot store the converted model: cannot write \S+ \(.+\); set XDG"):
        bundled.bundled_model(lambda _: None)
