"""Real commands on a real terminal, and what is left of them after they were killed."""

import contextlib
import fcntl
import os
import pty
import resource
import select
import signal
import socket
import struct
import subprocess
import sys
import termios
import threading

import psutil

from tests.waiting import until, wait_for

ENV = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TERM": "xterm-256color"}
SPECSCOPE = [sys.executable, "-m", "specscope"]


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def ended(process, seconds):
    """Whether a process ends within so long."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(seconds)
    return process.poll() is not None


@contextlib.contextmanager
def room_for(size):
    """No file of this process may grow beyond `size` bytes: what fits is written, then it fails, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


class Terminal:
    """A command that leads the session of a terminal of its own, and whatever it starts."""

    def __init__(self, command, size=(30, 110), **variables):
        self.master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", *size, 0, 0))

        def lead():
            for number in (signal.SIGHUP, signal.SIGQUIT):  # the tests may run under nohup, or in the background
                signal.signal(number, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            fcntl.ioctl(slave, termios.TIOCSCTTY, 0)

        self.process = subprocess.Popen(
            list(map(str, command)),
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env=ENV | variables,
            start_new_session=True,
            preexec_fn=lead,
        )
        os.close(slave)
        self.screen = b""
        self._open = True
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.family = []  # as it was when something was killed

    def _read(self):
        with contextlib.suppress(OSError):
            while self._open:
                if select.select([self.master], [], [], 0.05)[0]:
                    self.screen += os.read(self.master, 65536)

    def descendants(self):
        with contextlib.suppress(psutil.NoSuchProcess):
            return psutil.Process(self.process.pid).children(recursive=True)
        return []

    def find(self, part):
        """The first process below whose command line holds `part`."""
        for child in self.descendants():
            with contextlib.suppress(psutil.Error):
                if part in " ".join(child.cmdline()):
                    return child
        return None

    def remember(self):
        self.family = [psutil.Process(self.process.pid), *self.descendants()]

    def hang_up(self):
        """The terminal goes, as when its window is closed."""
        self.remember()
        self._close()

    def _close(self):
        self._open = False  # a read that waits would hold the terminal open
        self._reader.join()
        if self.master >= 0:
            os.close(self.master)
        self.master = -1

    def type(self, text):
        os.write(self.master, text.encode())

    def wait_for(self, condition):
        until(condition, says=lambda: f"the screen: {self.screen[-2000:]!r}")

    def left(self):
        """The processes of the family that stay; they end in a second where nothing else runs."""

        def gone():
            self.process.poll()  # else it stays as a zombie
            return not self._alive()

        return [] if wait_for(gone) else self._alive()

    def _alive(self):
        alive = []
        for member in self.family:
            with contextlib.suppress(psutil.NoSuchProcess):
                if member.is_running() and member.status() != psutil.STATUS_ZOMBIE:
                    alive.append(member)
        return alive

    def close(self):
        """Leave nothing behind, whatever the test found."""
        for member in {*self.family, *self.descendants()}:
            with contextlib.suppress(psutil.NoSuchProcess):
                member.kill()
        self.process.kill()
        self.process.wait()
        self._close()
