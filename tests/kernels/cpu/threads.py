"""Another number of torch's threads for a while."""

from contextlib import contextmanager

import torch


@contextmanager
def threads(count):
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
