"""`specscope serve` itself, as a command."""

import signal
import subprocess
import threading

from tests.processes import ENV, SPECSCOPE
from tests.serve.running import http
from tests.waiting import HANG_SECONDS, until

BODY = {"prompt": "abcabc", "temperature": 0, "ignore_eos": True}


class Command:
    """A server in a process of its own, and what it says."""

    def __init__(self, capture, *flags, model):
        if model is not None:
            flags += ("--target", model, "--drafter", "ngram", "--kv-memory", "0.01", "--threads", "1")
        command = [*SPECSCOPE, "serve", "--dtype", "float32", "--port", "0", "-o", capture, *flags]
        self.process = subprocess.Popen(list(map(str, command)), env=ENV, stderr=subprocess.PIPE, text=True)
        self.lines = []
        self._reader = threading.Thread(target=lambda: self.lines.extend(self.process.stderr), daemon=True)
        self._reader.start()
        until(lambda: self.url or self.process.poll() is not None)
        assert self.url, self.lines

    @property
    def url(self):
        return next((line.split(" on ")[1].split()[0] for line in self.lines if " on http://" in line), None)

    def stream(self, headers=None, **asked):
        """The lines of a stream, as they come."""
        how = {"json": {**BODY, "stream": True, **asked}, "headers": headers, "timeout": HANG_SECONDS}
        with http.stream("POST", self.url + "/v1/completions", **how) as answer:
            for line in answer.iter_lines():
                if line:
                    yield line.removeprefix("data: ")

    def gauge(self, name):
        """The sum of a metric's series."""
        text = http.get(self.url + "/metrics", timeout=HANG_SECONDS).text
        return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith(f"vllm:{name}{{"))

    def end(self, *numbers):
        """Its exit code after these signals, when all that it says has come."""
        for number in numbers:
            self.process.send_signal(number)
        code = self.process.wait(HANG_SECONDS)
        self._reader.join(HANG_SECONDS)
        return code

    def close(self):
        self.end(signal.SIGKILL)
