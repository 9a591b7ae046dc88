"""How fast the full-size model learns here: tables for README and notes.

    python .ci/measure.py random FILE            write random weights of the real shape (988 MB)
    python .ci/measure.py {sft,reward,generate,ppo} FILE [--device cuda] [--dtype float32]

Each task prints one JSON line (seconds an update, tokens, tokens per second). Tokens are counted as
a padded batch would count them: prompt and answer of every row, for pairs the prompt twice; for
`generate` and `ppo` sampled tokens, 64 an answer (no answer may end early, so that runs compare).
"""
import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import rlhf
import safetensors.torch
import torch

tokens = rlhf.Tokens()
tokens.eos_of_answers, tokens.eos = tokens.eos, -1      # for generate: no token ends an answer


def pinned_config():
    return rlhf.Qwen2Config.from_json(rlhf.HERE / "config.json")


def write_random_weights(path):
    """BF16 tensors of the pinned shape: sizes of activations like a trained model's, no meaning."""
    generator = torch.Generator().manual_seed(0)
    with torch.device("meta"):
        shapes = {name: t.shape for name, t in rlhf.Qwen2(pinned_config()).state_dict().items()}
    state = {name: (1 + torch.randn(shape, generator=generator) / 10 if "norm" in name else
                    torch.randn(shape, generator=generator) / 50).bfloat16()
             for name, shape in shapes.items()}
    safetensors.torch.save_file(state, path, {"format": "pt"})


def pairs_of(name, start, count, *columns):
    """(prompt, *answers) ids of corpus rows, with the real special ids."""
    tokens.eos = tokens.eos_of_answers
    rows = rlhf.read_json(rlhf.DATA / "train" / name)[start:start + count]
    found = [(tokens.prompt(row["prompt"]), *(tokens.answer(row[c]) for c in columns))
             for row in rows]
    tokens.eos = -1
    return found


def role(args, name, **kind):
    model = rlhf.load_qwen2(args.weights, pinned_config(), getattr(torch, args.dtype), args.device)
    return rlhf.build_role(name, model, **kind)


def loop_of(args, roles, rates):
    """A loop without a run folder around it: its steps are those of the phases."""
    run = SimpleNamespace(config=rlhf.Config(), device=torch.device(args.device), tokens=tokens,
                          go_on=lambda loop: None)
    loop = rlhf.Loop(run, "ppo", roles, 100, rates, mark=40)
    loop.seconds, loop.began = {}, time.monotonic()
    return loop


def timed(function, device):
    wait = torch.cuda.synchronize if device == "cuda" else (lambda: None)
    wait()
    started = time.perf_counter()
    result = function()
    wait()
    return time.perf_counter() - started, result


def learning_task(args):
    """Updates of 8 demonstrations, or of 8 pairs."""
    reward = args.task == "reward"
    loop = loop_of(args, {"learner": role(args, "actor", head="normal" if reward else None)},
                   {"learner": (100, 2e-5)})
    learner, seconds, counts = loop.roles["learner"], [], []
    for k in range(args.updates + 1):       # the first is a warm-up
        if reward:
            picked = pairs_of("preferences.jsonl", 8 * k, 8, "chosen", "rejected")
            gradient = lambda: rlhf.bradley_terry_loss(
                *rlhf.pair_scores(learner, picked)).backward()
            counts.append(sum(2 * len(p) + len(c) + len(r) for p, c, r in picked))
        else:
            picked = pairs_of("demonstrations.jsonl", 8 * k, 8, "completion")
            gradient = lambda: rlhf.sft_gradient(learner, picked, 16)
            counts.append(sum(len(p) + len(a) for p, a in picked))
        seconds.append(timed(lambda: (gradient(), loop.step("learner")), args.device)[0])
    return seconds[1:], counts[1:], {}


def generate_task(args):
    actor, seconds, counts = role(args, "actor", trainable=False), [], []
    for k in range(args.updates + 1):
        prompts = [prompt for prompt, in pairs_of("prompts.jsonl", 4 * k, 4)]
        uniforms = torch.rand(4, 64, generator=torch.Generator().manual_seed(k)).to(args.device)
        took, answers = timed(lambda: rlhf.generate(actor, prompts, 64, uniforms, eos=-1),
                              args.device)
        seconds.append(took)
        counts.append(sum(len(answer.ids) for answer in answers))
    return seconds[1:], counts[1:], {}


def ppo_task(args):
    roles = {"actor": role(args, "actor"), "critic": role(args, "critic", head="zero"),
             "reference": role(args, "reference", trainable=False),
             "reward": role(args, "reward", seed=50, head="normal", trainable=False)}
    loop = loop_of(args, roles, {"actor": (200, 5e-6), "critic": (200, 1e-5)})
    seconds, counts, parts = [], [], []

    def iteration():
        prompts = pairs_of("prompts.jsonl", 4 * loop.done, 4)
        batch, rollout, records, _ = rlhf.collect_rollouts(
            loop, [(f"OH{k:03d}-RL0", prompt) for k, (prompt,) in enumerate(prompts)])
        for _ in range(2):
            with loop.timed("actor optimisation"):
                rlhf.update_actor(loop, batch, rollout)
            with loop.timed("critic optimisation"):
                rlhf.update_critic(loop, batch, rollout)
        return records

    for k in range(args.updates + 1):
        loop.seconds = {}
        took, records = timed(iteration, args.device)
        seconds.append(took)
        parts.append(loop.seconds)
        counts.append(sum(len(record["response_ids"]) for record in records))
        loop.done += 1
    return seconds[1:], counts[1:], {name: round(statistics.median(p[name] for p in parts[1:]), 2)
                                     for name in parts[0]}


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=["random", "sft", "reward", "generate", "ppo"])
    parser.add_argument("weights")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--updates", type=int, default=3)
    args = parser.parse_args()
    if args.task == "random":
        return write_random_weights(args.weights)
    tasks = {"generate": generate_task, "ppo": ppo_task}
    seconds, counts, more = tasks.get(args.task, learning_task)(args)
    print(json.dumps({"task": args.task, "seconds": [round(s, 3) for s in seconds],
                      "tokens": counts, "median_seconds": round(statistics.median(seconds), 3),
                      "tokens_per_second": round(sum(counts) / sum(seconds), 1), **more}))


if __name__ == "__main__":
    main()
