"""What would make a device wait, counted where there is no device."""

import torch


class Reads:
    """Counts what takes a number from a tensor to Python: on a device each is a wait."""

    names = ("tolist", "item", "numpy", "cpu", "__float__", "__int__", "__bool__", "__index__")

    def __init__(self, monkeypatch):
        self.count = 0
        for name in self.names:
            monkeypatch.setattr(torch.Tensor, name, self.counted(getattr(torch.Tensor, name)))

    def counted(self, method):
        def call(*args, **kwargs):
            self.count += 1
            return method(*args, **kwargs)

        return call
