"""The measures of tests/test_house.py, and what breaks them today."""

import ast
import re
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parent.parent
MOST_LINES, FEWEST_LINES = 700, 60
MOST_FILES = 20  # of a folder
CROWDED: dict[str, int] = {
    "specscope/analyze/compare": 22,
}
NAMES: dict[str, int] = {}
FRAGMENTS: dict[str, int] = {
    "benchmarks/processor.py": 1,
    "benchmarks/scale_plot.py": 1,
    "kernels/kv_write.py": 1,
    "kernels/place.py": 1,
    "specscope/analyze/audit/options.py": 1,
    "specscope/analyze/compare/page.py": 1,
    "specscope/analyze/compare/text.py": 1,
    "specscope/analyze/diagnose/rerun/models.py": 1,
    "specscope/analyze/significance.py": 1,
    "specscope/cli/export.py": 1,
    "specscope/cli/numbers.py": 1,
    "specscope/cli/judges/verify.py": 1,
    "specscope/envelope.py": 1,
    "specscope/errors.py": 1,
    "specscope/gone.py": 1,
    "specscope/model/backend.py": 1,
    "specscope/model/device.py": 1,
    "specscope/model/meta.py": 1,
    "specscope/model/quiet.py": 1,
    "specscope/model/segment.py": 1,
    "specscope/model/warm_up.py": 1,
    "specscope/remote/guard.py": 1,
    "specscope/speculate/drafters/level.py": 1,
    "specscope/speculate/likeliest.py": 1,
    "specscope/speculate/raw_rows.py": 1,
    "specscope/speculate/tokens.py": 1,
    "specscope/speculate/verify/device.py": 1,
    "specscope/speculate/verify/distribution.py": 1,
    "specscope/terminal.py": 1,
    "specscope/trace/changes.py": 1,
    "specscope/trace/history/faults.py": 1,
    "specscope/trace/history/place_name.py": 1,
    "specscope/trace/history/ratios.py": 1,
    "specscope/trace/history/same.py": 1,
    "specscope/trace/record/equal.py": 1,
    "specscope/trace/record/form.py": 1,
    "specscope/trace/record/limits.py": 1,
    "specscope/trace/record/logprobs.py": 1,
    "specscope/trace/record/rules.py": 1,
    "specscope/trace/record/tokens.py": 1,
    "specscope/trace/wire/unfinite.py": 1,
    "specscope/train/attend.py": 1,
    "specscope/vllm/launch.py": 1,
    "specscope/vllm/stat_logger.py": 1,
}

SLEEPS: dict[str, int] = {
    "tests/bench/server.py": 1,
    "tests/remote/test_receiver.py": 1,
    "tests/serve/customers.py": 1,
    "tests/serve/test_crowd.py": 2,
    "tests/test_interrupt.py": 2,
    "tests/test_lifetime.py": 5,
    "tests/test_user_cache.py": 3,
    "tests/trace/wire/test_bus.py": 3,
    "tests/vllm/fakes.py": 1,
    "tests/vllm/serving.py": 1,
    "tests/vllm/test_debugger.py": 2,
    "tests/vllm/test_real_debug.py": 4,
    "tests/watch/test_source.py": 2,
    "tests/watch/test_watching.py": 1,
}


def sources():
    """Every source file but __init__.py, by its name from the root."""
    files = (path for top in ("specscope", "kernels", "benchmarks") for path in (ROOT / top).rglob("*.py"))
    return {path.relative_to(ROOT).as_posix(): path for path in files if path.name != "__init__.py"}


def lines(path):
    return len(path.read_text().splitlines())


def too_long():
    return {name: lines(path) for name, path in sources().items() if lines(path) > MOST_LINES}


def crowded():
    """Files of each folder that has too many."""
    counts = Counter(str(Path(name).parent) for name in sources())
    return {folder: count for folder, count in counts.items() if count > MOST_FILES}


def names_of_several():
    """Public classes at the top of a file whose name stands in several files, with how many files."""
    names = Counter()
    for path in sources().values():
        classes = {node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.ClassDef)}
        names.update(name for name in classes if not name.startswith("_"))
    return {name: count for name, count in names.items() if count > 1}


def fragments():
    """Files that are too short for one idea: 1 each."""
    return {name: 1 for name, path in sources().items() if lines(path) < FEWEST_LINES}


def sleeps():
    """Where a test waits for a while instead of for what happens (tests/waiting.py): sleeps of each file."""
    counts = {path: len(re.findall(r"\bsleep\(", path.read_text())) for path in (ROOT / "tests").rglob("*.py")}
    names = {path.relative_to(ROOT).as_posix(): count for path, count in counts.items() if count}
    return {name: count for name, count in names.items() if name not in ("tests/house.py", "tests/waiting.py")}


if __name__ == "__main__":
    for name, found in (
        ("CROWDED", crowded()),
        ("NAMES", names_of_several()),
        ("FRAGMENTS", fragments()),
        ("SLEEPS", sleeps()),
    ):
        print(f"{name}: dict[str, int] = {dict(sorted(found.items()))}")
