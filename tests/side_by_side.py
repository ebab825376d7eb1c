"""Every engine beside ours: `python -m tests.side_by_side FOLDER [ENGINE...]` writes a table of what each verb says.

Each engine decodes the same prompts with the same tiny trained models, in float32; FOLDER keeps the captures.
SPECSCOPE_VLLM_PYTHON names the interpreter of a vLLM with the plugin, as for tests/vllm.
docs/engines.md holds the table. Not a test.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.faults.models import story
from tests.vllm.models import DRAFT, HEAD, TARGET
from tests.vllm.record import run_inside

PROMPTS = [story(seed, 120) for seed in range(6)]
TOKENS = 60
SEED = 7
TEMPERATURES = {"greedy": 0.0, "sampled": 0.8}
LENGTH = 3  # tokens of a chain
OURS = {
    "plain": ("--drafter", "none"),
    "chain, n-gram": ("--drafter", "ngram", "--tree", f"{LENGTH}"),
    "chain, draft model": ("--drafter", "draft_model", "--draft-model", str(DRAFT), "--tree", f"{LENGTH}"),
    "chain, EAGLE-3 head": ("--drafter", "eagle", "--draft-model", str(HEAD), "--tree", f"{LENGTH}"),
    "tree, EAGLE-3 head": ("--drafter", "eagle", "--draft-model", str(HEAD), "--tree", f"2x{LENGTH}"),
}
NO_HEADS = "has no EAGLE heads"
NO_PLAIN = "plain generate() has no hook: there is nothing to judge"
NO_TREES = "drafts chains only"
VERBS = ("verify", "diagnose --only audit", "diagnose")


# Each records into a capture, and says why it cannot, or "". `drafting`: a key of OURS; `sampling`: of TEMPERATURES.


def ours(engine: str, drafting: str, sampling: str, capture: Path) -> str:
    prompts = capture.with_suffix(".prompts")
    prompts.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS))
    flags = (*OURS[drafting], "--dtype", "float32", "--target", str(TARGET), "--ignore-eos", "--raw", "--quiet")
    flags = (*flags, "--max-tokens", str(TOKENS), "--seed", str(SEED), "--temperature", str(TEMPERATURES[sampling]))
    done = specscope("capture", str(prompts), "-o", str(capture), *flags)
    return "" if done.returncode == 0 else done.stderr.strip().splitlines()[-1]


def transformers(engine: str, drafting: str, sampling: str, capture: Path) -> str:
    if why := {"plain": NO_PLAIN, "chain, EAGLE-3 head": NO_HEADS, "tree, EAGLE-3 head": NO_TREES}.get(drafting):
        return why
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    import specscope

    tokenizer = AutoTokenizer.from_pretrained(TARGET)
    target = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32)
    how: dict[str, object] = {"prompt_lookup_num_tokens": LENGTH, "max_matching_ngram_size": 4}
    if drafting == "chain, draft model":
        assistant = AutoModelForCausalLM.from_pretrained(DRAFT, dtype=torch.float32)
        assistant.generation_config.num_assistant_tokens = LENGTH
        assistant.generation_config.assistant_confidence_threshold = 0.0
        how = {"assistant_model": assistant}
    if temperature := TEMPERATURES[sampling]:
        how |= {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
    else:
        how |= {"do_sample": False}
    target.generation_config.eos_token_id = None
    torch.manual_seed(SEED)
    with specscope.record(capture):
        for prompt in PROMPTS:
            inputs = tokenizer(prompt, return_tensors="pt")
            target.generate(**inputs, **how, max_new_tokens=TOKENS)
    return ""


def vllm(engine: str, drafting: str, sampling: str, capture: Path) -> str:
    """On the runner that the engine's name tells."""
    python = os.environ.get("SPECSCOPE_VLLM_PYTHON")
    if not python:
        return "SPECSCOPE_VLLM_PYTHON names no vLLM"
    if drafting == "tree, EAGLE-3 head":
        return NO_TREES
    speculation: dict[str, object] | None = {
        "plain": None,
        "chain, n-gram": {"method": "ngram", "prompt_lookup_max": 4, "prompt_lookup_min": 2},
        "chain, draft model": {"method": "draft_model", "model": str(DRAFT), "draft_sample_method": "probabilistic"},
        "chain, EAGLE-3 head": {"method": "eagle3", "model": str(HEAD), "draft_sample_method": "probabilistic"},
    }[drafting]
    if speculation is not None:
        speculation["num_speculative_tokens"] = LENGTH
    temperature = TEMPERATURES[sampling]
    seed = SEED if temperature and speculation else None  # plain, a CPU has no seeds in 0.32
    params = {"temperature": temperature, "max_tokens": TOKENS, "ignore_eos": True, "seed": seed}
    job = {
        "v2": engine == "vLLM V2",
        "model": str(TARGET),
        "speculation": speculation,
        # In 0.32, V1 feeds a head the wrong token behind a chunk of a prompt, and a CPU has no seeds there
        "engine": {"max_model_len": 256, "max_num_batched_tokens": 256 if engine == "vLLM V2" else 2048}
        | ({} if speculation else {"per_request_spec_decode_metrics": "none"}),
        "runs": [{"name": capture.stem, "prompts": PROMPTS, "params": [params] * len(PROMPTS)}],
    }
    try:
        run_inside(capture.parent, job, python, f"{capture.stem}.log")
    except AssertionError as error:
        return str(error)
    return ""


ENGINES = {"ours": ours, "transformers": transformers, "vLLM V1": vllm, "vLLM V2": vllm}


def specscope(*words: str) -> subprocess.CompletedProcess[str]:
    """A command of specscope, as people run it."""
    return subprocess.run([sys.executable, "-m", "specscope", *words], capture_output=True, text=True, check=False)


def verdict(verb: str, *words: str) -> str:
    """What a verb that judges says, in a cell of the table; its whole answer goes to the log."""
    done = specscope(*verb.split(), *words)
    answer = f"{done.stdout}{done.stderr}exit code {done.returncode}"
    print(f"$ specscope {verb} {' '.join(words)}\n{answer}\n", file=sys.stderr, flush=True)
    return {0: "passed", 1: "**failed**"}.get(done.returncode, "not judged")


def compared(other: Path, capture: Path) -> str:
    """What `compare` says of our capture and another, with the number of prompts that both have."""
    answer = json.loads(specscope("compare", str(other), str(capture), "--json").stdout)
    print(json.dumps(answer), file=sys.stderr, flush=True)
    return f"{answer['answer']}, {len(answer['pairs'])} pairs" if "answer" in answer else "not judged"


def row(folder: Path, engine: str, drafting: str, sampling: str) -> list[str]:
    """A line of the table."""
    capture, other = (
        folder / f"{name}-{drafting}-{sampling}.jsonl".replace(",", "").replace(" ", "-") for name in (engine, "ours")
    )
    why = "" if capture.exists() else ENGINES[engine](engine, drafting, sampling, capture)
    if why:
        return [engine, drafting, sampling, why, *["-"] * len(VERBS), "-"]
    figures = json.loads(specscope("report", str(capture), "--json").stdout)["pooled"]
    counts = f"{figures['steps']} steps, {figures['drafted']} drafted, {figures['accepted']} accepted"
    judged = [verdict(verb, str(capture)) for verb in VERBS]
    return [engine, drafting, sampling, counts, *judged, "-" if other == capture else compared(other, capture)]


def main() -> None:
    """Fill the table. Every engine's captures are made once: delete a file to make it again."""
    folder = Path(sys.argv[1]).absolute()
    folder.mkdir(exist_ok=True)
    wanted = sys.argv[2:] or list(ENGINES)
    print("| engine | drafting | sampling | capture | verify | audit | diagnose | compare with ours |")
    print("|---|---|---|---|---|---|---|---|")
    for engine in wanted:
        for drafting in OURS:
            for sampling in TEMPERATURES:
                print(f"| {' | '.join(row(folder, engine, drafting, sampling))} |", flush=True)


if __name__ == "__main__":
    main()
