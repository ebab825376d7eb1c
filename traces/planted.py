"""Makes planted.jsonl: a run whose drafter has a bug, to practise on. `python traces/planted.py`.

The bug is a classic: the drafter proposes what follows one token too late, as if the root had been drafted already.
"""

from pathlib import Path

from specscope import Engine, SamplingParams
from specscope.speculate.drafters.base import NO_DRAFT, Context, Draft
from specscope.speculate.drafters.text import NgramDrafter, NgramIndex, distinct, trie
from specscope.trace.wire.outputs import OutputOptions, Outputs
from specscope.trace.wire.spans import SpanLevel

PROMPT = "Repeat this line three times: The quick brown fox jumps over the lazy dog near the river bank."


class Shifted(NgramDrafter):
    """Prompt lookup, off by one."""

    def _continue(self, context: Context, index: NgramIndex) -> Draft:
        tokens = context.tokens
        for size in range(min(self.longest, len(tokens) - 1), self.shortest - 1, -1):
            late = (end + 1 for end in index.ends(size) if end + 1 < len(tokens))  # the planted mistake
            if found := distinct((tokens[end : end + self.depth] for end in late), self.width):
                return Draft(trie(found))
        return NO_DRAFT


def main() -> None:
    """Run it, recorded."""
    engine = Engine(drafter="ngram", tree="4", dtype="float32")
    engine.parts.drafter = Shifted(depth=4)
    params = SamplingParams(max_tokens=40)
    path = Path(__file__).parent / "planted.jsonl"
    options = OutputOptions(str(path), None, None, SpanLevel.TREES, None)
    outputs = Outputs(options, engine.bus, engine.run_info, engine.vocabulary, params)
    (result,) = engine.generate(engine.turn(PROMPT), params)
    outputs.close()
    print(result.text, "\nacceptance length", result.acceptance.tau)


if __name__ == "__main__":
    main()
