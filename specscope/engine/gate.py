"""Gate: whether a step drafts at all. Trees that follow costs are another matter (speculate/sizing)."""

from __future__ import annotations

SHARE = 4  # drafting is on again when a quarter fewer requests decode than where it goes off


class SpeculationGate:
    """Off where that was chosen, and while many requests decode.

    At the limit the number of requests goes up and down from step to step, so drafting is on again only well below it.
    Prefills do not count: they come and go in bursts (vLLM 49548). Which requests draft decides how drafts fall, and
    so which tokens a sampled request is given, though not how they are distributed.
    """

    def __init__(self, *, chosen: bool = True, disable_above: int | None = None) -> None:
        """`disable_above`: the most requests that decode in a step that drafts."""
        self.chosen, self.disable_above = chosen, disable_above
        self.crowded = False  # whether drafting went off because of the load

    def why_off(self, decoding: int) -> str:
        """Why the next step does not draft, in which so many requests decode; "" where it does."""
        if not self.chosen:
            return "set to off"
        limit = self.disable_above
        if limit is None:
            return ""
        again = limit - max(limit // SHARE, 1)
        self.crowded = decoding > (again if self.crowded else limit)
        if not self.crowded:
            return ""
        return f"decoding requests above {limit}" if decoding > limit else f"decoding requests still above {again}"
