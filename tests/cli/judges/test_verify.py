"""`specscope verify`: exit codes, files, and bad input in one line."""

import json
from pathlib import Path

from tests.bad_inputs import PLANTED
from tests.support.commands import run_here

SAMPLED = str(Path(PLANTED).parent / "sampled.jsonl")


def test_a_healthy_capture():
    code, out, err = run_here(["verify", SAMPLED])
    assert (code, err) == (0, "")
    assert out.splitlines()[-1].startswith("consistent: ")
    assert "with 95 % power" in " ".join(out.split())


def test_a_capture_that_was_tampered_with(tmp_path):
    path = tmp_path / "bad.jsonl"
    lines = Path(SAMPLED).read_text().splitlines(keepends=True)
    at = next(i for i, line in enumerate(lines) if "specscope.final.coin" in line)
    cut = lines[at].index("specscope.final.coin")
    start = lines[at].index('"doubleValue":', cut) + len('"doubleValue":')
    end = lines[at].index("}", start)
    lines[at] = lines[at][:start] + "0.125" + lines[at][end:]
    path.write_text("".join(lines))
    code, out, _ = run_here(["verify", str(path)])
    assert code == 1
    assert "✗ coins" in out
    assert f"specscope open '{path}#r" in out.replace("\n", "")
    code, out, _ = run_here(["verify", str(path), "--json"])
    found = json.loads(out)
    checks = {check["name"]: check for group in found["captures"][0]["groups"] for check in group["checks"]}
    assert found["exit"] == 1
    assert checks["coins"]["result"] == "failed"
    assert checks["coins"]["failed"] == 1
    assert checks["outcomes"]["result"] == "passed"


def test_a_capture_with_nothing_to_judge(tmp_path):
    path = tmp_path / "head.jsonl"
    path.write_text(Path(SAMPLED).read_text().splitlines(keepends=True)[0])
    code, out, _ = run_here(["verify", str(path)])
    assert code == 2
    assert "CANNOT BE JUDGED" in out
