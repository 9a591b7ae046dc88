"""How fast the full-size model learns here, and how the cost grows: tables for README and notes.

    python .ci/measure.py random FILE            write random weights of the real shape (988 MB)
    python .ci/measure.py {sft,reward,generate,ppo,growth} FILE [--device cuda] [--updates N]

Each task prints one JSON line (seconds an update, tokens, tokens per second). Tokens are counted as
a padded batch would count them: prompt and answer of every row, for pairs the prompt twice; for
`generate` and `ppo` sampled tokens, 64 an answer (no answer may end early, so that runs compare).
"""
import argparse
import dataclasses
import json
import statistics
import sys
import time
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import qwen
import rlhf
import safetensors.torch
import torch

tokens = rlhf.Tokens()
cfg = SimpleNamespace(**dataclasses.asdict(rlhf.Config()))


def write_random_weights(path):
    """BF16 tensors of the pinned shape: sizes of activations like a trained model's, no meaning."""
    config, generator = rlhf.pinned_config(), torch.Generator().manual_seed(0)
    with torch.device("meta"):
        shapes = {name: t.shape for name, t in rlhf.Qwen2(config).state_dict().items()}
    state = {name: (1 + torch.randn(shape, generator=generator) / 10 if "norm" in name else
                    torch.randn(shape, generator=generator) / 50).bfloat16()
             for name, shape in shapes.items()}
    safetensors.torch.save_file(state, path)


def load(path, device):
    return rlhf.load_qwen2(path, rlhf.pinned_config(), device=device)


def rows(name, start, count):
    return rlhf.read_jsonl(rlhf.DATA / "train" / name)[start:start + count]


def pairs_of(rows, *columns):
    return [(tokens.prompt(row["prompt"]), *(tokens.answer(row[c]) for c in columns))
            for row in rows]


def timed(function, device):
    wait = torch.cuda.synchronize if device == "cuda" else (lambda: None)
    wait()
    started = time.perf_counter()
    result = function()
    wait()
    return time.perf_counter() - started, result


class Learner:
    """One role and its optimizer, stepped as the phases step theirs."""

    def __init__(self, args, name, head=None):
        self.role = rlhf.build_role(name, load(args.weights, args.device), head=head)
        self.training = rlhf.Training(name, cfg, 100, {name: self.role}, {name: (100, 2e-5)}, {})
        self.name, self.update = name, 0

    def step(self, gradient):
        gradient()
        self.training.apply(self.name, self.update)
        self.update += 1


def learning_task(args):
    reward = args.task == "reward"
    learner = Learner(args, args.task, "normal" if reward else None)
    seconds, counts = [], []
    for k in range(args.updates + 1):       # the first is a warm-up
        if reward:
            picked = pairs_of(rows("preferences.jsonl", 8 * k, 8), "chosen", "rejected")
            gradient = lambda: rlhf.bradley_terry_loss(
                *rlhf.pair_scores(learner.role, picked)).backward()
            counts.append(sum(2 * len(p) + len(c) + len(r) for p, c, r in picked))
        else:
            picked = pairs_of(rows("demonstrations.jsonl", 8 * k, 8), "completion")
            gradient = lambda: rlhf.sft_gradient(learner.role, picked, cfg.micro_batch)
            counts.append(sum(len(p) + len(a) for p, a in picked))
        seconds.append(timed(lambda: learner.step(gradient), args.device)[0])
    return seconds[1:], counts[1:], {}


def without_end(function):
    """Run function while no token ends an answer: every answer gets its 64 tokens."""
    end, rlhf.EOS = rlhf.EOS, -1
    try:
        return function()
    finally:
        rlhf.EOS = end


def generate_task(args):
    role = rlhf.build_role("actor", load(args.weights, args.device), trainable=False)
    seconds, counts = [], []
    for k in range(args.updates + 1):
        prompts = [p for p, in pairs_of(rows("prompts.jsonl", 4 * k, 4))]
        uniforms = torch.rand(4, 64, generator=torch.Generator().manual_seed(k)).to(args.device)
        took, answers = timed(lambda: without_end(
            lambda: rlhf.generate(role, prompts, 64, uniforms)), args.device)
        seconds.append(took)
        counts.append(sum(len(a.ids) for a in answers))
    return seconds[1:], counts[1:], {}


def ppo_task(args):
    prompts = [(row["id"], tokens.prompt(row["prompt"])) for row in rows("prompts.jsonl", 0, 672)]
    build = lambda name, **kind: rlhf.build_role(name, load(args.weights, args.device), **kind)
    roles = {"actor": build("actor"), "critic": build("critic", head="zero"),
             "reference": build("reference", trainable=False),
             "reward": build("reward", seed=50, head="normal", trainable=False)}
    training = rlhf.Training("ppo", cfg, 100, roles, {"actor": (200, 5e-6), "critic": (200, 1e-5)},
                             {"iterations": []})
    sample, seconds, counts = rlhf.generate, [], []
    rlhf.generate = lambda *inputs: without_end(lambda: sample(*inputs))
    for k in range(args.updates + 1):
        took, records = timed(lambda: rlhf.ppo_iteration(training, prompts, tokens), args.device)
        seconds.append(took)
        counts.append(sum(len(record["response_ids"]) for record in records))
        training.next += 1
    parts = [entry["seconds"] for entry in training.history["iterations"][1:]]
    return seconds[1:], counts[1:], {name: round(statistics.median(p[name] for p in parts), 2)
                                     for name in parts[0]}


def arithmetic(config, nodes, answer_tokens):
    """Multiply-adds of one actor pass and its gradient with respect to activations, in 10^12."""
    H, I, kv = config.hidden_size, config.intermediate_size, \
        config.num_key_value_heads * config.head_dim
    projections = config.num_hidden_layers * (2 * H * H + 2 * H * kv + 3 * H * I)
    return 2 * (nodes * projections + answer_tokens * H * config.vocab_size) / 1e12


def growth_task(args):
    """Seconds of one SFT gradient against rows, then against the answers' length."""
    role = rlhf.build_role("actor", load(args.weights, args.device))
    generator, config, lines = torch.Generator().manual_seed(0), role.model.config, []
    cases = [(n, 0) for n in (1, 2, 4, 8, 16, 32)] + [(4, n) for n in (8, 16, 32, 64)]
    for count, length in cases:
        examples = pairs_of(rows("demonstrations.jsonl", 0, count), "completion")
        if length:
            examples = [(p, torch.randint(150000, (length,), generator=generator).tolist())
                        for p, _ in examples]
        batch = rlhf.collate(*zip(*examples))
        nodes = len(qwen.PrefixTree(batch.ids, batch.attention).place)
        gradient = lambda: rlhf.sft_gradient(role, examples, count)
        took = min(timed(gradient, args.device)[0] for _ in range(args.updates + 1))
        answers = sum(len(a) for _, a in examples)
        lines.append({"rows": count, "answer tokens": answers, "all tokens": int(
            batch.attention.sum()), "computed": nodes, "10^12 multiply-adds": round(
            arithmetic(config, nodes, answers), 3), "seconds": round(took, 3)})
        print(json.dumps(lines[-1]), flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=["random", "sft", "reward", "generate", "ppo", "growth"])
    parser.add_argument("weights")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--updates", type=int, default=3)
    args = parser.parse_args()
    if args.task == "random":
        return write_random_weights(args.weights)
    if args.task == "growth":
        return growth_task(args)
    tasks = {"generate": generate_task, "ppo": ppo_task}
    seconds, counts, more = tasks.get(args.task, learning_task)(args)
    print(json.dumps({"task": args.task, "seconds": [round(s, 3) for s in seconds],
                      "tokens": counts, "median_seconds": round(statistics.median(seconds), 3),
                      "tokens_per_second": round(sum(counts) / sum(seconds), 1), **more}))


if __name__ == "__main__":
    main()
