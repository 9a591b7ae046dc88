"""The budgets and proofs of a finished run of the whole course (called by .ci/run)."""
import json
import sys
from pathlib import Path

run = Path(sys.argv[1])
read = lambda path: json.loads((run / path).read_text("utf-8"))
sft, reward, ppo = (read(f"{phase}/history.json") for phase in ("sft", "reward", "ppo"))
rollouts = [read(f"ppo/rollouts/{n:04d}.json") for n in range(1, 101)]
responses = [response for rollout in rollouts for response in rollout["responses"]]
phases = read("run.json")["phases"]
answers = [len((run / f"evaluation/{name}.jsonl").read_text("utf-8").splitlines())
           for name in ("base", "sft", "ppo")]
greedy = [entry["greedy_rubric_success"] for entry in (sft["before"], sft["validation"][-1])]
scores = [entry["mean_score"] for entry in ppo["iterations"]]
claims = {
    "63 SFT updates": len(sft["updates"]) == 63,
    "210 reward updates": len(reward["updates"]) == 210,
    "100 iterations": len(ppo["iterations"]) == 100,
    "400 responses from 400 different prompts":
        len({r["rollout_id"] for r in responses}) == len({r["prompt_id"] for r in responses}) == 400,
    "200 + 200 updates": [sum(len(e[kind]) for e in ppo["iterations"])
                          for kind in ("actor_updates", "critic_updates")] == [200, 200],
    "three proofs PASS": all(read(f"resume/{p}.json")["status"] == "PASS"
                             for p in ("sft", "reward", "ppo")),
    "3 x 260 answers": answers == [260, 260, 260],
    "80 probes": read("probes/results.json")["rows"] == 80,
    "under 6 minutes": sum(phase["seconds"] for phase in phases.values()) < 360,
    "at most 0.7 GB": max(phase["peak_memory_mb"] or 0 for phase in phases.values()) <= 700,
    "base/ at most 8 MB": sum(f.stat().st_size for f in (run / "base").iterdir()) <= 8 << 20,
    "base is mediocre on validation (5-60 %)": 0.05 <= greedy[0] <= 0.60,
    "SFT leaves room on validation (60-85 %)": 0.60 <= greedy[-1] <= 0.85,
    "judge is right on 85 % of the validation pairs": reward["validation"][-1]["accuracy"] >= 0.85,
    "judge score rises in PPO": sum(scores[-20:]) > sum(scores[:20]),
}
for claim, holds in claims.items():
    print("holds" if holds else "FAILS", claim)
sys.exit(not all(claims.values()))
