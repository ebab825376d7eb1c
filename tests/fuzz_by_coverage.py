"""A reader of tests/fuzzing.py under atheris, which looks for bytes that reach more of the code.

`python -m tests.fuzz_by_coverage NAME SECONDS`; atheris is not among the requirements (pip install atheris). It ends
the process where something goes wrong, and leaves the bytes in a file.
"""

import sys
import tempfile
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["specscope"]):
    from tests import fuzzing

if __name__ == "__main__":
    name, seconds = sys.argv[1:]
    corpus = Path(tempfile.mkdtemp(prefix="specscope-corpus-"))
    for number, sample in enumerate(fuzzing.samples()[name]):
        (corpus / str(number)).write_bytes(sample)
    flags = [f"-max_total_time={seconds}", "-timeout=60", "-rss_limit_mb=3000", "-max_len=60000", str(corpus)]
    atheris.Setup([sys.argv[0], *flags], lambda data: fuzzing.run(name, data))
    atheris.Fuzz()
