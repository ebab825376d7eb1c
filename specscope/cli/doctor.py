"""`specscope doctor`: what was found, what is missing, and the remedy."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import platform
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

import specscope
from specscope.cli.captures import answer_json
from specscope.cli.help import verb
from specscope.cli.options import json_option
from specscope.cli.streams import show
from specscope.engine.config import DEFAULT_HEAD
from specscope.errors import first_line
from specscope.plans.kinds import is_head


@verb()
@json_option
def doctor(*, as_json: bool) -> None:
    """Show what this machine has, what is missing and how to fix it.

    \b
      specscope doctor

    Exit code: 1 if something required is missing, else 0.
    """
    findings = []
    for finding in examine():
        findings.append(finding)
        if not as_json:
            mark = "✓" if finding.good else "✗" if finding.needed else "–"
            show(f"{mark} {finding.name:<18} {finding.text}")
            if not finding.good and finding.remedy:
                show(f"  {'':<18} → {finding.remedy}")
    code = int(any(finding.needed and not finding.good for finding in findings))
    if as_json:
        answer_json("doctor", {"findings": [dataclasses.asdict(finding) for finding in findings]}, (), code=code)
    sys.exit(code)


@dataclass(frozen=True)
class Examined:
    name: str
    good: bool
    text: str
    remedy: str = ""  # what to do if it is not good
    needed: bool = True  # False: specscope runs without it


def examine() -> Iterator[Examined]:
    yield Examined("specscope", True, specscope.__version__)
    yield Examined("python", True, platform.python_version())
    yield _terminal()
    yield from _torch()
    yield from (_package(name) for name in ("transformers", "textual", "opentelemetry-sdk", "gguf"))
    yield _package("pyarrow", "for specscope export: pip install 'specscope[export]'", needed=False)
    yield _model()
    head, lacks = f"EAGLE-3, {DEFAULT_HEAD}", "the default drafter is ngram"
    there = is_head(DEFAULT_HEAD)
    yield Examined("default head", there, head if there else "not installed", lacks, needed=there)


def _package(name: str, remedy: str = "", *, needed: bool = True) -> Examined:
    try:
        return Examined(name, True, version(name), needed=needed)
    except PackageNotFoundError:
        return Examined(name, False, "not installed", remedy or f"pip install {name}", needed)


def _terminal() -> Examined:
    size = shutil.get_terminal_size((0, 0))
    where = f"{os.environ.get('TERM', 'unknown')}, {size.columns}x{size.lines}, {sys.stdout.encoding}"
    if not sys.stdout.isatty():
        return Examined("terminal", True, f"{where}, output is not a terminal")
    utf8 = (sys.stdout.encoding or "").lower().replace("-", "") == "utf8"
    fits = size.columns >= 60 and size.lines >= 20
    remedy = "set a UTF-8 locale (LANG=C.UTF-8)" if not utf8 else "make the window at least 60x20; 120x40 is better"
    return Examined("terminal", utf8 and fits, where, remedy)


def _torch() -> Iterator[Examined]:
    if importlib.util.find_spec("torch") is None:
        yield Examined("torch", False, "not installed", "pip install torch")
        return
    try:
        import torch
    except Exception as error:  # a library that it needs is not there, or is another version
        yield Examined("torch", False, f"installed, but cannot be loaded: {first_line(error)}", "install it again")
        return

    yield Examined("torch", True, torch.__version__)
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        memory = torch.cuda.get_device_properties(0).total_memory / 2**30
        yield Examined("device", True, f"{torch.cuda.get_device_name(0)}, {memory:.0f} GiB, CUDA {torch.version.cuda}")
    else:
        cpu = torch.backends.cpu.get_cpu_capability()
        yield Examined("device", True, f"CPU, {torch.get_num_threads()} threads, {cpu}")
        yield from _fast_paths()
    auto = "triton, with CUDA graphs" if on_gpu else "torch; triton and CUDA graphs need a CUDA GPU"
    yield Examined("backend", True, f"auto is {auto}")
    yield _package("triton", "pip install triton, if you have a GPU", needed=False)


def _fast_paths() -> Iterator[Examined]:
    """Which fast paths this CPU uses, and why it cannot use the others. Each is tried."""
    from specscope.model.fast.linear import DTYPES, FUSE, PATHS, VARIABLE, disabled, failure, has_bfloat16

    dtype = "bfloat16" if has_bfloat16() else "float32 (the CPU has no bfloat16 arithmetic)"
    yield Examined("dtype", True, f"auto is {dtype}")
    off = disabled()
    for path, kind in ((path, kind) for path in PATHS for kind in DTYPES):
        reason = f"disabled by {VARIABLE}" if path in off else failure(path, kind)
        text = f"{path} for {str(kind).removeprefix('torch.')}"
        yield Examined("fast path", reason is None, text + (f": {reason}" if reason else ""), needed=False)
    text = f"{FUSE}: disabled by {VARIABLE}" if FUSE in off else FUSE
    yield Examined("fast path", FUSE not in off, text, needed=False)


def _model() -> Examined:
    from specscope.model.places import NAME, REMEDY, converted_folder, find_gguf

    if (converted_folder() / "config.json").exists():
        return Examined("default model", True, f"{NAME}, converted, in {converted_folder()}")
    if find_gguf() is not None:
        return Examined("default model", True, f"{NAME}, converted at the first start")
    return Examined("default model", False, "not installed", f"{REMEDY}, or use --target", needed=False)
