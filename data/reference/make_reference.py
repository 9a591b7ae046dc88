"""Makes the reference values beside this file, with transformers and PEFT (not needed to run them).

    python data/reference/make_reference.py

The tests compare qwen.py and LoRALinear with these values on machines that have neither package.
Weights are stored in BF16 and drawn from fixed seeds; logits are the FP32 eager forward's.
"""

import json
import platform
from pathlib import Path

import peft
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
ALPHA, RANK = 16, 8


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


def lora_reference(dtype, generator):
    """One PEFT layer: its inputs, its output, and every gradient for one upstream gradient."""
    def draw(*shape):
        return torch.randn(shape, generator=generator)

    inner = torch.nn.Module()
    inner.proj = torch.nn.Linear(24, 40)
    inner.proj.weight.data = (0.2 * draw(40, 24)).to(dtype)
    inner.proj.bias.data = draw(40).to(dtype)
    config = peft.LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=["proj"], lora_dropout=0.0)
    layer = peft.inject_adapter_in_model(config, inner).proj.eval()
    A, B = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    A.data, B.data = 0.3 * draw(RANK, 24), 0.3 * draw(40, RANK)  # FP32, whatever the base is
    x, grad_y = draw(2, 5, 24).to(dtype).requires_grad_(), draw(2, 5, 40).to(dtype)
    y = layer(x)
    assert y.dtype == dtype and A.dtype == B.dtype == torch.float32
    y.backward(grad_y)
    values = {"weight": layer.base_layer.weight, "bias": layer.base_layer.bias, "lora_A": A,
              "lora_B": B, "x": x, "y": y, "grad_y": grad_y, "grad_lora_A": A.grad,
              "grad_lora_B": B.grad, "grad_x": x.grad}
    return {name: value.detach().clone() for name, value in values.items()}


if __name__ == "__main__":
    torch.set_num_threads(1)
    for seed, name in enumerate(SIZES):
        forward_reference(name, seed)
    generator = torch.Generator().manual_seed(2)
    cases = {"float32": torch.float32, "bfloat16": torch.bfloat16}
    save_file({f"{case}.{name}": value for case, dtype in cases.items()
               for name, value in lora_reference(dtype, generator).items()},
              HERE / "lora.safetensors")
    made_with = {"python": platform.python_version(), "torch": torch.__version__,
                 "transformers": transformers.__version__, "peft": peft.__version__,
                 "machine": platform.machine(), "lora_alpha": ALPHA, "lora_rank": RANK}
    (HERE / "made_with.json").write_text(json.dumps(made_with, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(made_with))
