"""`specscope serve` itself, as a command."""

import subprocess

import httpx2

from tests.processes import ENV, SPECSCOPE
from tests.waiting import HANG_SECONDS

BODY = {"prompt": "abcabc", "temperature": 0, "ignore_eos": True}


class Command:
    """`specscope serve` over the tiny model, in a process of its own."""

    def __init__(self, tiny, capture, *flags):
        self.said = ""
        how = ["--target", tiny, "--drafter", "ngram", "--dtype", "float32", "--kv-memory", "0.01", "--threads", "1"]
        command = [*SPECSCOPE, "serve", *how, "--port", "0", "-o", capture, *flags]
        self.process = subprocess.Popen(list(map(str, command)), env=ENV, stderr=subprocess.PIPE, text=True)
        for line in self.process.stderr:
            self.said += line
            if " on http://" in line:
                self.url = line.split(" on ")[1].split()[0]
                return
        raise AssertionError(self.process.wait(HANG_SECONDS))

    def stream(self, headers=None, **asked):
        """The lines of a stream, as they come."""
        body = {**BODY, "stream": True, **asked}
        with httpx2.stream(
            "POST", self.url + "/v1/completions", json=body, headers=headers, timeout=HANG_SECONDS
        ) as answer:
            for line in answer.iter_lines():
                if line:
                    yield line.removeprefix("data: ")
