"""Real vLLM's server, started with the plugin on: what several tests ask, and end in their own ways. Not a test."""

import json
import os
import signal
import subprocess
import urllib.request
from contextlib import suppress

from tests.processes import free_port
from tests.vllm.models import TARGET
from tests.vllm.planted import eagle
from tests.vllm.record import clean_environment
from tests.waiting import wait_for

PYTHON = os.environ.get("SPECSCOPE_VLLM_PYTHON", "")
LOAD_SECONDS = 600  # on a busy machine
EAGLE = eagle(4)
OFFLINE = {"HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
OPTIONS = ["--dtype", "float32", "--max-model-len", "1024", "--enforce-eager", "--host", "127.0.0.1"]


def ask(url, prompt, tokens, **more):
    """A server's answer, as it comes: the caller reads and closes it."""
    asked = {"model": "it", "prompt": prompt, "max_tokens": tokens, "ignore_eos": True} | more
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(asked).encode(), {"Content-Type": "application/json"}
    )
    return urllib.request.urlopen(request, timeout=LOAD_SECONDS)


class Server:
    """`with Server(...) as server`: one that answers. It has a process group of its own, as a shell's job has."""

    def __init__(self, log, *options, model=TARGET, speculation=EAGLE, **variables):
        """`log`: the file that its output goes to."""
        self.log, port = log, free_port()
        command = [PYTHON, "-P", "-m", "specscope.vllm.launch", "serve", str(model), *OPTIONS, "--port", str(port)]
        command += ["--served-model-name", "it", "--speculative-config", json.dumps(speculation)]
        command += ["--per-request-spec-decode-metrics", "detailed", *options]
        self.url = f"http://127.0.0.1:{port}"
        with log.open("w") as file:
            self.process = subprocess.Popen(
                command, env=clean_environment(**OFFLINE, **variables), stdout=file, stderr=file, start_new_session=True
            )

    def __enter__(self):
        try:
            assert wait_for(self._answers, LOAD_SECONDS), self.said()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        """Nothing of it is left."""
        with suppress(ProcessLookupError):
            self.signal(signal.SIGKILL, group=True)
        self.process.wait()

    def _answers(self):
        assert self.process.poll() is None, self.said()
        try:
            self.get("/health")
        except OSError:
            return False
        return True

    def said(self, lines=30):
        """The end of its log."""
        return "\n".join(self.log.read_text().splitlines()[-lines:])

    def get(self, path):
        with urllib.request.urlopen(self.url + path, timeout=10) as answer:
            return answer.read().decode()

    def counted(self, prompt, tokens, **more):
        """(drafts, drafted, accepted) of a request, as vLLM's answer has them."""
        with ask(self.url, prompt, tokens, **more) as answer:
            told = json.load(answer)["metrics"]["speculative_decoding"]
        return told["num_spec_steps"], told["num_draft_tokens"], told["num_accepted_draft_tokens"]

    def signal(self, number=signal.SIGINT, *, group=False):
        """To the server, or to all of its processes, as a terminal does."""
        (os.killpg if group else os.kill)(self.process.pid, number)

    def ended(self):
        """Its exit code."""
        return self.process.wait(LOAD_SECONDS)
