"""A drafter of one's own that is a model: tests run it beside specscope's."""

from itertools import pairwise

import torch

import specscope


class Bigrams(specscope.Drafter):
    """What followed each token in the text so far, as logits."""

    def __init__(self, setup):
        self.plan, self.size = setup.plan, setup.target.vocab_size
        self.max_nodes, self.max_depth = self.plan.max_nodes, self.plan.max_depth

    def propose(self, contexts):
        return [specscope.draft_tree(context, self.plan, self.behind(context)) for context in contexts]

    def behind(self, context):
        tokens = list(context.tokens)

        def logits(paths):
            rows = torch.zeros(len(paths), self.size)
            for row, path in zip(rows, paths, strict=True):
                last = [*tokens, *path][-1]
                for token, following in pairwise(tokens):
                    row[following] += 4.0 * (token == last)
            return rows

        return logits
