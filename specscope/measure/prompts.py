"""The prompts that the benchmarks run."""

from __future__ import annotations

import json
from pathlib import Path

PLAIN = (
    "Explain how a suspension bridge carries its load.",
    "Write a short story about a lighthouse keeper who finds a message in a bottle.",
    "What are the main differences between a virus and a bacterium?",
    "Give me a recipe for a simple vegetable soup and say why each step matters.",
    "Describe the water cycle to a ten year old, from the sea to the tap.",
    "Why is the sky blue at noon and red at sunset?",
    "List five habits that help people learn a new language, with a reason for each.",
    "Tell me about the history of the printing press and its effect on Europe.",
)

_FUNCTION = """def total_price(items, tax_rate):
    total = 0
    for item in items:
        price = item["price"]
        quantity = item["quantity"]
        total = total + price * quantity
    tax = total * tax_rate
    return total + tax


def cheapest_item(items):
    cheapest = None
    for item in items:
        if cheapest is None or item["price"] < cheapest["price"]:
            cheapest = item
    return cheapest
"""

_CLASS = """class Account:
    def __init__(self, owner, balance):
        self.owner = owner
        self.balance = balance

    def deposit(self, amount):
        self.balance = self.balance + amount
        return self.balance

    def withdraw(self, amount):
        if amount > self.balance:
            raise ValueError("not enough money")
        self.balance = self.balance - amount
        return self.balance
"""

_REPORT = (
    "The city council met on Tuesday to discuss the new bridge over the river. The bridge will carry two lanes of "
    "traffic in each direction, and a separate path for people on foot and on bicycles. Construction will begin in "
    "March and is expected to take two years. The council has set aside forty million dollars for the project. Some "
    "residents are worried about noise during construction, and the council has promised that no work will be done "
    "at night. The old bridge will stay open until the new bridge is finished."
)

COPYING = (
    f"Repeat this Python code exactly, and add a comment above each function:\n\n{_FUNCTION}",
    f"Rename the variable `total` to `amount` in this code and print the whole code again:\n\n{_FUNCTION}",
    f"Here is a class:\n\n{_CLASS}\nPrint the same class again with a docstring in every method.",
    f"Summarise the following text by quoting its most important sentences word for word:\n\n{_REPORT}",
    f"Correct any spelling mistakes in this text and print the whole text again:\n\n{_REPORT}",
)


def unseen_prompts(count: int | None = None) -> list[str]:
    """Prompts of five kinds that the default head was not trained on: all, or `count` evenly chosen ones."""
    lines = map(json.loads, (Path(__file__).parent / "unseen.jsonl").read_text("utf-8").splitlines())
    prompts = [str(line["prompt"]) for line in lines]
    return prompts if count is None else prompts[:: len(prompts) // count][:count]
