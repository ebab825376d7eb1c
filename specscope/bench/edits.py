"""An agent-like workload: ten edits of one file, each asked for with the file as it then is."""

from __future__ import annotations

from dataclasses import dataclass

FILE = '''import json


class Inventory:
    """Items of a shop, with their prices and how many there are."""

    def __init__(self, path):
        self.path = path
        self.items = {}

    def load(self):
        with open(self.path) as file:
            self.items = json.load(file)

    def save(self):
        with open(self.path, "w") as file:
            json.dump(self.items, file)

    def add(self, name, price, count):
        self.items[name] = {"price": price, "count": count}

    def remove(self, name):
        del self.items[name]

    def total(self):
        total = 0
        for item in self.items.values():
            total = total + item["price"] * item["count"]
        return total

    def find(self, text):
        found = []
        for name in self.items:
            if text in name:
                found.append(name)
        return found
'''


@dataclass(frozen=True)
class Edit:
    """A change that is asked for in words, and what it makes of the file. What a model answers does not matter."""

    ask: str
    old: str
    new: str


EDITS = (
    Edit("rename the variable `total` in the method `total` to `amount`", "total = 0\n", "amount = 0\n"),
    Edit("use += in that method", "total = total + item", "amount += item"),
    Edit("make the method `total` return `amount`", "return total", "return amount"),
    Edit('write the JSON with `indent=2`', "json.dump(self.items, file)", "json.dump(self.items, file, indent=2)"),
    Edit("give the parameter `count` the default 1", "price, count):", "price, count=1):"),
    Edit("let `remove` ignore a name that is not there", "del self.items[name]", "self.items.pop(name, None)"),
    Edit("let `find` ignore upper and lower case", "if text in name:", "if text.lower() in name.lower():"),
    Edit("sort what `find` returns", "return found", "return sorted(found)"),
    Edit("open the file as UTF-8 when it is read", "open(self.path) as", 'open(self.path, encoding="utf-8") as'),
    Edit("rename the class to `Stock`", "class Inventory:", "class Stock:"),
)  # fmt: skip


def edit_prompts() -> list[str]:
    """The prompt of each turn, with the file as the turns before it left it."""
    text, prompts = FILE, []
    for edit in EDITS:
        prompts.append(f"Here is a file:\n\n```python\n{text}```\n\nPlease {edit.ask}. Print the whole file again.")
        text = text.replace(edit.old, edit.new)
    return prompts
