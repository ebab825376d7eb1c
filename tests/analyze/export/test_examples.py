"""EXAMPLES.md: each block runs, and prints what stands behind it."""

import json
import subprocess
import sys

import pytest

from tests.analyze.export.examples import BLOCK, PAGE, shown

TEXT = PAGE.read_text()


@pytest.fixture(scope="module")
def run():
    words = [sys.executable, "-m", "tests.analyze.export.examples", "--print"]
    done = subprocess.run(words, capture_output=True, cwd=PAGE.parents[3], check=True)
    return [tuple(pair) for pair in json.loads(done.stdout)]


@pytest.mark.parametrize("at", range(sum(language != "text" for language, _ in BLOCK.findall(TEXT))))
def test_an_example_prints_what_it_says(run, at):
    block, wanted = list(shown(TEXT))[at]
    assert run[at] == (block, wanted)


def test_the_page_answers_in_both_languages():
    languages = [language for language, _ in BLOCK.findall(TEXT)]
    assert languages.count("sql") >= 8
    assert languages.count("python") >= 4
    assert all(out for block, out in shown(TEXT) if not block.startswith("specscope"))


def test_the_page_is_linked():
    page = (PAGE.parents[3] / "docs" / "export.md").read_text()
    assert f"(../{PAGE.relative_to(PAGE.parents[3])})" in page
