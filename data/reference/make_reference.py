"""Makes the reference values beside this file, with transformers (not needed to run them).

    python data/reference/make_reference.py

The tests compare qwen.py with these values on machines without it.
Weights are stored in BF16 and drawn from fixed seeds; logits are the FP32 eager forward's.
"""

import json
import platform
from pathlib import Path

import torch
import transformers
from safetensors.torch import save_file

HERE = Path(__file__).parent
COMMON = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_act": "silu",
    "max_position_embeddings": 128, "rms_norm_eps": 1e-6, "rope_theta": 1e6,
    "use_sliding_window": False, "torch_dtype": "bfloat16", "vocab_size": 64,
}
SIZES = {
    "tied": {"hidden_size": 32, "intermediate_size": 44, "num_hidden_layers": 2,
             "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True},
    "untied": {"hidden_size": 30, "intermediate_size": 51, "num_hidden_layers": 3,
               "num_attention_heads": 5, "num_key_value_heads": 1, "tie_word_embeddings": False},
}
TOKENS, PADDING = 13, (0, 7, 2)  # one row for each number of padding tokens on the left


def forward_reference(name, seed):
    settings = {**COMMON, **SIZES[name]}
    (HERE / f"{name}.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    config = transformers.Qwen2Config(**{k: v for k, v in settings.items() if k != "torch_dtype"},
                                      attn_implementation="eager")
    model = transformers.Qwen2ForCausalLM(config).eval()
    generator = torch.Generator().manual_seed(seed)
    for key, parameter in sorted(model.named_parameters()):
        noise = torch.randn(parameter.shape, generator=generator)
        value = 1 + 0.2 * noise if "norm" in key else 0.25 * noise  # wide: attention must matter
        parameter.data = value.bfloat16().float()

    mask = torch.ones(len(PADDING), TOKENS, dtype=torch.int64)
    for row, padding in enumerate(PADDING):
        mask[row, :padding] = 0
    ids = torch.randint(64, mask.shape, generator=generator)
    position_ids = (mask.cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad():
        full = model(input_ids=ids).logits
        padded = model(input_ids=ids, attention_mask=mask, position_ids=position_ids).logits
    weights = {k: v.bfloat16().clone() for k, v in model.state_dict().items()
               if k != "lm_head.weight" or not config.tie_word_embeddings}
    save_file(weights, HERE / f"{name}.safetensors", metadata={"format": "pt"})
    save_file({"input_ids": ids, "attention_mask": mask, "logits": full, "padded_logits": padded},
              HERE / f"{name}_logits.safetensors")


if __name__ == "__main__":
    torch.set_num_threads(1)
    for seed, name in enumerate(SIZES):
        forward_reference(name, seed)
    made_with = {"python": platform.python_version(), "torch": torch.__version__,
                 "transformers": transformers.__version__, "machine": platform.machine()}
    (HERE / "made_with.json").write_text(json.dumps(made_with, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(made_with))
