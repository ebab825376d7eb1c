"""A small SGLang: modules by its names, with a scheduler that overlaps steps or not, over tables instead of models.

The target's logits after a token are a row of a table, and so are the drafter's. What decides is SGLang's own where its
source is at hand (wheel.py), and else does the same: `eagle_sample` here, the kernels in kernels.py.
"""

import sys
from array import array
from collections import deque
from dataclasses import dataclass, field
from types import SimpleNamespace

import torch

from specscope.sglang import hooks as known
from specscope.trace.inside.hooking import signatures
from tests.sglang import kernels
from tests.support.sources import by_name, put

VOCABULARY = 12
EOS = 11
TREE = (-1, -1, 0, 0, 1)  # nodes' parents; slots are one more
ROOTED = "sglang.srt"
PARALLEL = SimpleNamespace(attn_tp_rank=0, pp_rank=0, pp_size=1, dp_rank=None, tp_group=SimpleNamespace(world_size=1))


def as_sglang(module, name, **defaults):
    """Makes a function of SGLang's parameters, in its newest version, of one that takes them all as one object."""
    return by_name(name, signatures(known.WRAPPED[module], name)[-1], **defaults)


def tables(seed=0):
    """(The target's logits after each token, the drafter's)."""
    made = torch.Generator().manual_seed(seed)
    target = 1.5 * torch.randn(VOCABULARY, VOCABULARY, generator=made)
    draft = target + torch.randn(VOCABULARY, VOCABULARY, generator=made)
    target[:, EOS] -= 3
    draft[:, EOS] -= 9  # no drafter drafts what never comes
    return target, draft


class Lacking(SimpleNamespace):
    """All that was not given is None."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)


def reason(kind, **rest):
    """Why a request ended, as SGLang has it."""
    return SimpleNamespace(to_json=lambda: {"type": kind, **rest})


def params(**given):
    """SGLang's SamplingParams, normalised."""
    values = {"temperature": 1.0, "top_p": 1.0, "top_k": 1 << 30, "min_p": 0.0, "max_new_tokens": 24}
    values |= {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0, "min_new_tokens": 0}
    values |= {"sampling_seed": None, "logit_bias": None, "stop_strs": [], "stop_token_ids": None, "ignore_eos": False}
    return SimpleNamespace(**(values | given))


GREEDY = {"top_k": 1}


@dataclass
class Req:
    """A request, as far as the plugin reads it."""

    rid: str
    origin_input_ids: list
    sampling_params: SimpleNamespace = field(default_factory=params)
    output_ids: array = field(default_factory=lambda: array("q"))
    finished_reason: SimpleNamespace | None = None
    finished_len: int | None = None
    is_retracted: bool = False
    inflight_middle_chunks: int = 0
    eos_token_ids: frozenset = frozenset({EOS})
    tokenizer: object = None

    def finished(self):
        return self.finished_reason is not None

    @property
    def output_ids_through_stop(self):
        return self.output_ids if self.finished_len is None else self.output_ids[: self.finished_len]

    def update_finish_state(self, new):
        most = self.sampling_params.max_new_tokens
        before = len(self.output_ids) - new
        for place, token in enumerate(self.output_ids[before:], before + 1):
            if token == EOS:
                self.finished_reason, self.finished_len = reason("stop", matched=EOS), place
                break
        if len(self.output_ids) >= most and (self.finished_len is None or self.finished_len > most):
            self.finished_reason, self.finished_len = reason("length", length=most), most


@dataclass
class Settings:
    """get_spec(): of SGLang's configuration."""

    speculative_algorithm: str = "EAGLE"
    speculative_draft_model_path: str = "some/head"
    speculative_num_steps: int = 3
    speculative_eagle_topk: int = 1
    speculative_num_draft_tokens: int = 4
    speculative_use_rejection_sampling: bool = False
    speculative_use_block_verification: bool = False
    speculative_accept_threshold_single: float = 1.0
    speculative_accept_threshold_acc: float = 1.0


def top_k_renorm(probs, top_ks):
    """Of each row its likeliest tokens."""
    order = probs.argsort(dim=-1, descending=True).argsort(dim=-1)
    kept = torch.where(order < top_ks.reshape(-1, 1), probs, 0.0)
    return kept / kept.sum(-1, keepdim=True)


@as_sglang(known.VERIFY, "eagle_sample")
def eagle_sample(given):
    """As the wheel's, for what the stand does."""
    verify, rules, logits = sys.modules[known.VERIFY], given.batch.sampling_info, given.logits_output.next_token_logits
    asked, batch_size, spec = given.verify_input, len(given.batch.seq_lens), verify.get_spec()
    n = asked.draft_token_num
    if rules.acc_additive_penalties is not None:
        logits.add_(rules.acc_additive_penalties.repeat_interleave(n, 0))
    candidates = asked.draft_token.reshape(batch_size, n)
    links = (asked.retrieve_index, asked.retrieve_next_token, asked.retrieve_next_sibling)
    outcome = room(candidates, asked.max_tree_depth)
    predict, index, count = outcome
    ratios = spec.speculative_use_rejection_sampling
    flags = {"is_cpu": verify._is_cpu, "is_hip": verify._is_hip, "is_xpu": verify._is_xpu}
    if verify._verify_uses_greedy(is_all_greedy=rules.is_all_greedy, use_rejection_sampling=ratios, **flags):
        kernels.greedy_tree(*outcome, candidates, *links, logits.argmax(-1).reshape(batch_size, n))
        return predict, count + 1, index
    p = (logits / rules.temperatures.repeat_interleave(n, 0)).softmax(-1)
    p = top_k_renorm(p, rules.top_ks.repeat_interleave(n)).reshape(batch_size, n, -1)
    q = asked.draft_probs if ratios else torch.zeros_like(p)
    coins = torch.rand(batch_size, n), torch.rand(batch_size)
    limits = spec.speculative_accept_threshold_single, spec.speculative_accept_threshold_acc
    function = sys.modules[known.TREE].tree_speculative_sampling_target_only
    more = {}
    if ratios:
        function = sys.modules[known.CHAIN].chain_speculative_sampling_triton
        more = {"block_verification": True} if spec.speculative_use_block_verification else {}
    function(*outcome, candidates, *links, *coins, p, q, *limits, True, **more)
    return predict, count + 1, index


def room(candidates, depth):
    """(Tokens by slot, the path's slots, counts) that a kernel writes."""
    kind, batch = {"dtype": torch.int32, "device": candidates.device}, len(candidates)
    return torch.zeros(candidates.numel(), **kind), torch.full((batch, depth), -1, **kind), torch.zeros(batch, **kind)


def organize_draft_results(score_list, token_list, parents_list, num_draft_token):
    """The best of all drafts, as the wheel's."""
    scores, tokens = torch.cat(score_list, dim=1).flatten(1), torch.cat(token_list, dim=1)
    chosen = scores.topk(num_draft_token - 1, dim=-1).indices.sort().values
    return torch.empty(len(scores), 0), chosen, tokens.gather(1, chosen)


def _verify_uses_greedy(*, is_all_greedy, is_cpu, is_hip, is_xpu, use_rejection_sampling):
    return is_all_greedy or is_cpu or is_xpu or (is_hip and not use_rejection_sampling)


class EagleDraftWorker:
    """Drafts by the drafter's table."""

    def __init__(self, draft, spec):
        self._draft, self._spec = draft, spec

    def draft(self, batch, *, with_topology=False):
        """What is to be verified behind the batch's roots."""
        topk, n = self._spec.speculative_eagle_topk, self._spec.speculative_num_draft_tokens
        if self._spec.speculative_algorithm == "NGRAM":
            return self._padded(batch, n)
        if topk > 1:
            return self._tree(batch)
        tokens, probs = [batch.roots], []
        for _ in range(n - 1):
            q = (self._draft[tokens[-1]] / batch.sampling_info.temperatures).softmax(-1)
            probs.append(q)
            sampled = self._spec.speculative_use_rejection_sampling
            tokens.append(q.multinomial(1)[:, 0] if sampled else q.argmax(-1))
        first = torch.tensor([*range(1, n), -1]).repeat(len(batch.roots), 1)
        none = torch.full_like(first, -1)
        return _verify_input(torch.stack(tokens, 1), first, none, 1, n, torch.stack(probs, 1) if n > 1 else None)

    def _padded(self, batch, n):
        """A text's continuation of two tokens, and token 0 below the root up to n slots, as fillResult does."""
        first = self._draft[batch.roots].argmax(-1)
        tokens = torch.stack([batch.roots, first, self._draft[first].argmax(-1)], dim=1)
        tokens = torch.cat([tokens, torch.zeros(len(tokens), n - 3, dtype=torch.int64)], dim=1)
        pads = list(range(3, n))
        first_child = torch.tensor([1, 2, *[-1] * (n - 2)]).repeat(len(tokens), 1)
        sibling = torch.tensor([-1, *(pads[:1] or [-1]), -1, *pads[1:], *([-1] if pads else [])])
        return _verify_input(tokens, first_child, sibling.repeat(len(tokens), 1), -1, n, None)

    def _tree(self, batch):
        """Two children of the root, then two of the first and one of the second: all are among the best."""
        first = self._draft[batch.roots].softmax(-1).topk(2)
        second = [self._draft[first.indices[:, i]].softmax(-1).topk(2) for i in (0, 1)]
        scores = [first.values[:, None], *(first.values[:, i, None, None] * second[i].values[:, None] for i in (0, 1))]
        ids = [first.indices, *(each.indices for each in second)]
        scores[2][:, :, 1] = 0  # the last of six is never among the best five
        _, _, drafted = sys.modules[known.VERIFY].organize_draft_results(scores, ids, [ids[0]], len(TREE) + 1)
        tokens = torch.cat([batch.roots[:, None], drafted], dim=1)
        first_child = torch.tensor([1, 3, 5, -1, -1, -1]).repeat(len(tokens), 1)
        sibling = torch.tensor([-1, 2, -1, 4, -1, -1]).repeat(len(tokens), 1)
        return _verify_input(tokens, first_child, sibling, 2, 3, None)


def _verify_input(tokens, first_child, sibling, topk, depth, probs):
    batch, n = tokens.shape
    return SimpleNamespace(
        draft_token=tokens.flatten(),
        retrieve_index=torch.arange(batch * n).view(batch, n),
        retrieve_next_token=first_child,
        retrieve_next_sibling=sibling,
        draft_token_num=n,
        tree_topk=topk,
        max_tree_depth=depth,
        draft_probs=probs,
        custom_mask=None,
        positions=None,
    )


class SchedulerBatchResultProcessor:
    """Takes results, as the wheel's does."""

    def __init__(self):
        self.is_generation = True
        self.model_config = SimpleNamespace(dtype=torch.float32, context_len=4096)

    def _resolve_spec_v2_tokens(self, result, batch):
        stride = result.speculative_num_draft_tokens
        ids, lens = result.next_token_ids.tolist(), result.accept_lens.tolist()
        return [ids[i * stride : i * stride + lens[i]] for i in range(len(batch.reqs))]

    def process_batch_result_decode(self, batch, result):
        tokens = self._resolve_spec_v2_tokens(result, batch)
        for req, new in zip(batch.reqs, tokens, strict=True):
            if not (req.finished() or req.is_retracted):
                req.output_ids.extend(new)
                req.update_finish_state(len(new))

    def process_batch_result_prefill(self, batch, result):
        for req, token in zip(batch.reqs, result.next_token_ids.tolist(), strict=True):
            if req.is_retracted or req.finished():
                continue
            if req.inflight_middle_chunks > 0:
                req.inflight_middle_chunks -= 1
                continue
            req.output_ids.append(token)
            req.update_finish_state(1)


class DFlashWorkerV2:
    """Only what is wrapped."""

    @as_sglang(known.DFLASH, "DFlashWorkerV2._accept_block", target_predict=None)
    def _accept_block(self, given):
        candidates, logits, (bs, n) = given.candidates, given.next_token_logits, given.candidates.shape
        first = torch.tensor([*range(1, n), -1]).repeat(bs, 1)
        links = torch.arange(bs * n).view(bs, n), first, torch.full_like(first, -1)
        outcome = predict, accepted, count = room(candidates, n)
        if given.sampling_info.is_all_greedy:
            kernels.greedy_tree(*outcome, candidates, *links, logits.argmax(-1).view(bs, n))
        else:
            p = (logits / given.sampling_info.temperatures.repeat_interleave(n, 0)).softmax(-1).view(bs, n, -1)
            drawn = sys.modules[known.TREE].tree_speculative_sampling_target_only
            drawn(*outcome, candidates, *links, torch.rand(bs, n), torch.rand(bs), p, torch.zeros_like(p))
        bonus = predict[accepted.gather(1, count[:, None].long())[:, 0].long()]
        return count, count + 1, bonus, None, None


class Registry:
    """What HookRegistry does, for a target that is there: AROUND alone, and at once."""

    def apply_hooks(self):
        """Done already."""

    def register(self, target, hook, kind):
        module = max((name for name in sys.modules if target.startswith(f"{name}.")), key=len)
        *outer, name = target.removeprefix(f"{module}.").split(".")
        owner = sys.modules[module]
        for part in outer:
            owner = getattr(owner, part)
        original = getattr(owner, name)

        def around(*args, **kwargs):
            return hook(original, *args, **kwargs)

        around.__wrapped__, around.__module__, around.__name__ = original, original.__module__, name
        setattr(owner, name, around)


def install(monkeypatch, spec, on_cpu=False, **replaced):
    """Put the modules where SGLang's are. `replaced`: others of them, by name."""
    made = {
        known.VERIFY: {
            **{each.__name__: each for each in (eagle_sample, organize_draft_results, _verify_uses_greedy)},
            **{"get_spec": lambda: spec, "_is_cpu": on_cpu, "_is_hip": False, "_is_xpu": False},
        },
        known.DRAFT: {"EagleDraftWorker": EagleDraftWorker},
        known.DFLASH: {"DFlashWorkerV2": DFlashWorkerV2},
        known.RESULTS: {"SchedulerBatchResultProcessor": SchedulerBatchResultProcessor},
        known.TREE: {"tree_speculative_sampling_target_only": kernels.target_only},
        known.CHAIN: {"chain_speculative_sampling_triton": kernels.chain},
        f"{ROOTED}.plugins.hook_registry": {"HookRegistry": Registry(), "HookType": SimpleNamespace(AROUND="around")},
        f"{ROOTED}.runtime_context": {
            "get_spec": lambda: spec,
            "get_parallel": lambda: PARALLEL,
            "get_server_args": lambda: SimpleNamespace(model_path="some/target", random_seed=1, page_size=1),
        },
        f"{ROOTED}.speculative.spec_utils": {"SIMULATE_ACC_LEN": 0.0},
    }
    put(monkeypatch, made, **replaced)


class Engine:
    """A scheduler and its worker. With `overlap` a step is launched before the result of the last one is taken."""

    def __init__(self, spec, seed=0, overlap=False, penalty=None, processor=None, result=SimpleNamespace):
        self.target, draft = tables(seed)
        self.spec, self.overlap, self.penalty = spec, overlap, penalty
        self.worker = sys.modules[known.DRAFT].EagleDraftWorker(draft, spec)
        self.processor = (processor or sys.modules[known.RESULTS].SchedulerBatchResultProcessor)()
        self._result = result
        self.counts = []  # of accepted drafts, as SGLang counts them
        torch.manual_seed(seed)

    def _rules(self, reqs):
        """What a batch is sampled by; penalties are written into the logits."""
        tops = torch.tensor([req.sampling_params.top_k for req in reqs])
        return Lacking(
            temperatures=torch.tensor([[req.sampling_params.temperature] for req in reqs]),
            top_ks=tops,
            need_top_k_sampling=bool((tops < VOCABULARY).any()),
            is_all_greedy=bool((tops <= 1).all()),
            acc_additive_penalties=None if self.penalty is None else self.penalty.repeat(len(reqs), 1),
        )

    def _batch(self, reqs, lengths, roots, prefix=None):
        return Lacking(
            reqs=list(reqs),
            seq_lens=torch.tensor(lengths),
            roots=roots,
            sampling_info=self._rules(reqs) if reqs else None,
            forward_mode=SimpleNamespace(is_idle=lambda: False, is_extend=lambda: False, is_decode=lambda: True),
            device="cpu",
            spec_algorithm=SimpleNamespace(is_none=lambda: False),
            return_logprob=False,
            return_hidden_states_mode=0,
            batch_size=lambda: len(reqs),
            prefix_lens=prefix,
            extend_lens=None if prefix is None else [n - p for n, p in zip(lengths, prefix, strict=True)],
        )

    def prefill(self, reqs, prefix=0):
        """Of whole prompts, or of prompts with what they have put out."""
        fed = [[*req.origin_input_ids, *req.output_ids] for req in reqs]
        p = self.target[torch.tensor([tokens[-1] for tokens in fed])].softmax(-1)
        tops = torch.tensor([req.sampling_params.top_k for req in reqs])
        tokens = top_k_renorm(p, tops.clamp_max(VOCABULARY)).multinomial(1)[:, 0]
        batch = self._batch(reqs, [len(tokens) for tokens in fed], tokens, [prefix] * len(reqs))
        self.processor.process_batch_result_prefill(batch, self._result(next_token_ids=tokens))

    def step(self, reqs, lengths, roots):
        """Draft and verify; (the batch, its result)."""
        batch = self._batch(reqs, lengths, roots)
        verify = self.worker.draft(batch)
        candidates = verify.draft_token.reshape(len(reqs), -1)
        logits = SimpleNamespace(next_token_logits=self.target[verify.draft_token].clone())
        predict, lens, index = sys.modules[known.VERIFY].eagle_sample(verify, batch, logits)
        n = candidates.shape[1]
        ids = torch.zeros(len(reqs), n, dtype=torch.int64)
        for b, length in enumerate(lens.tolist()):
            ids[b, :length] = predict[index[b, :length].long()].long()
        made = self._result(next_token_ids=ids.flatten(), accept_lens=lens, speculative_num_draft_tokens=n)
        return batch, made

    def run(self, reqs):
        """Until all have ended. Every request runs from its first token on."""
        self.prefill(reqs)
        lengths = [len(req.origin_input_ids) for req in reqs]
        roots = torch.tensor([req.output_ids[-1] for req in reqs])
        running, waiting = list(range(len(reqs))), deque()
        while True:
            running = [i for i in running if not reqs[i].finished()]
            if running:
                waiting.append(self.step([reqs[i] for i in running], [lengths[i] for i in running], roots[running]))
                lens, ids = waiting[-1][1].accept_lens.tolist(), waiting[-1][1].next_token_ids.view(len(running), -1)
                for row, i in enumerate(running):
                    lengths[i] += lens[row]
                    roots[i] = ids[row, lens[row] - 1]
            if waiting and (not running or len(waiting) > self.overlap):
                batch, result = waiting.popleft()
                live = [not req.finished() for req in batch.reqs]
                self.processor.process_batch_result_decode(batch, result)
                self.counts += [n - 1 for n, there in zip(result.accept_lens.tolist(), live, strict=True) if there]
            if not running and not waiting:
                return
