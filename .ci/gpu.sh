#!/usr/bin/env bash
# What has to hold on a CUDA machine, and how fast it is there. Needs the five packages (torch with
# CUDA) in the Python that is called; about ten minutes. Prints to stdout; $1 is a scratch folder.
set -euo pipefail
cd "$(dirname "$0")/.."
work=${1:-$(mktemp -d)}
mkdir -p "$work"
export HF_HUB_OFFLINE=1 HF_HOME="$work/huggingface"

echo "== machine"
python -c "import torch; print(torch.__version__, torch.cuda.get_device_name())"

echo "== tests"
python -m pytest -q

echo "== the whole course, tiny model, twice on the GPU: equal digests"
for turn in 1 2; do
    python rlhf.py --phase all --device cuda --out "$work/tiny$turn" > "$work/tiny$turn.txt"
    tail -n 34 "$work/tiny$turn.txt"
    python .ci/check_run.py "$work/tiny$turn"
done
for file in sft/adapter_model reward/adapter_model ppo/actor/adapter_model ppo/critic/adapter_model
do
    cmp "$work/tiny1/$file.safetensors" "$work/tiny2/$file.safetensors" && echo "equal: $file"
done

echo "== full size, random weights"
weights="$work/random.safetensors"
[ -f "$weights" ] || python .ci/measure.py random "$weights"
python - "$weights" <<'PYTHON'
import sys
import torch
import rlhf
ids = torch.randint(150000, (2, 80), generator=torch.Generator().manual_seed(0))
out = {}
for device in ("cpu", "cuda"):
    model = rlhf.load_qwen2(sys.argv[1], rlhf.Qwen2Config.from_json("config.json"), device=device)
    with torch.no_grad():
        out[device] = model.logits(model(ids.to(device))).float().cpu()
    del model
gap, scale = (out["cpu"] - out["cuda"]).abs(), out["cpu"].std()
print(f"logits CPU/GPU: largest difference {gap.max():.3f}, mean {gap.mean():.4f}, std {scale:.3f}")
assert gap.mean() < 0.05 * scale, "beyond what BF16 explains"
PYTHON
for task in sft reward generate ppo; do
    python .ci/measure.py "$task" "$weights" --device cuda --updates 10
done

echo "== the whole course at full size"
mkdir -p "$work/model" && cp config.json tokenizer.json "$work/model/"
ln -sf "$weights" "$work/model/model.safetensors"
time python rlhf.py --phase all --device cuda --model "$work/model" --out "$work/full"
