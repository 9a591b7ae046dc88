"""The course is checked here, in the order of the script. The oracles share no code with it: brute
force, finite differences, FP64 NumPy, values worked by hand, the contract's tables written out
again, committed logits of transformers, and (tests named `live`) transformers, PEFT, datasets and
TRL themselves where they are installed."""

import collections
import contextlib
import dataclasses
import gzip
import hashlib
import io
import itertools
import json
import math
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import unicodedata
from itertools import product
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace

import numpy as np
import pytest
import tokenizers
import torch
from pytest import approx, raises
from safetensors.torch import load_file, save_file

import qwen
import rlhf
from qwen import KVCache, Qwen2, Qwen2Config, load_qwen2
from rlhf import Config, CourseError, collate

HERE = Path(rlhf.__file__).resolve().parent
REFERENCE = HERE / "data/reference"
parametrize = pytest.mark.parametrize


# == Helpers of all parts: small random models, roles, batches; damage to files ====================

def seeded(seed):
    return torch.Generator().manual_seed(seed)

def mini_config(vocab=40, hidden=16, layers=2, heads=4, kv_heads=2, tied=True):
    return Qwen2Config(
        vocab_size=vocab, hidden_size=hidden, intermediate_size=2 * hidden + 5,
        num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=kv_heads,
        rms_norm_eps=1e-6, rope_theta=1e6, tie_word_embeddings=tied)

def mini_model(config=None, seed=0, dtype=torch.float32):
    """A frozen Qwen2 with random weights that are exact in BF16, so that both dtypes hold them."""
    model = Qwen2(config or mini_config())
    generator = seeded(seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            noise = torch.randn(p.shape, generator=generator)
            p.copy_((1 + 0.2 * noise if "norm" in name else 0.25 * noise).bfloat16())
    return model.to(dtype).requires_grad_(False).eval()

def mini_role(name="actor", head=None, trainable=True, seed=49, config=None, dtype=torch.float32,
              disturbed=None):
    """disturbed: a seed from which all that it learns is moved; no adapter is then a no-op."""
    role = rlhf.build_role(name, mini_model(config, dtype=dtype), seed, head=head,
                           trainable=trainable)
    if disturbed is not None:
        generator = seeded(disturbed)
        with torch.no_grad():
            for p in role.learned().values():
                p.add_(0.1 * torch.randn(p.shape, generator=generator))
    return role

def mini_checkpoint(folder, model):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(model.config.to_dict()), "utf-8")
    save_file({name: p.detach().bfloat16().contiguous() for name, p in model.named_parameters()},
              folder / "model.safetensors", metadata={"format": "pt"})
    return folder / "model.safetensors"

def random_ids(*shape, seed=0, vocab=40):
    return torch.randint(vocab, shape, generator=seeded(seed))

def rows_of(*lengths):
    """A boolean mask with that many leading ones a row."""
    return torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]

def gap(a, b):
    a, b = (torch.as_tensor(x, dtype=torch.float64) for x in (a, b))
    assert a.shape == b.shape, f"{tuple(a.shape)} beside {tuple(b.shape)}"
    return (a - b).abs().max().item()

def edit_json(path, change):
    """Apply change(content) to a JSON file in place; one with a seal gets a right one again."""
    content = json.loads(path.read_text("utf-8"))
    content.pop("seal", None)
    change(content)
    rlhf.write(path, content)

@contextlib.contextmanager
def restored(*paths):
    """Whatever the block does to these files, they are what they were afterwards."""
    contents = [path.read_bytes() for path in paths]
    try:
        yield
    finally:
        for path, content in zip(paths, contents):
            path.write_bytes(content)

def edit_tensors(path, change):
    content = load_file(path)
    change(content)
    save_file(content, path, metadata={"format": "pt"})

@pytest.fixture(scope="session")
def pinned():
    return rlhf.Tokens()


# == The forward (qwen.py) =========================================================================
# Three oracles: committed logits of transformers, transformers itself where it is installed, and
# the equations in NumPy. Then the cache, padding, common beginnings, loading.

def reference_model(name):
    config = Qwen2Config.from_json(REFERENCE / f"{name}.json")
    return load_qwen2(REFERENCE / f"{name}.safetensors", config, dtype=torch.float32)

@parametrize("name", ["tied", "untied"])
def test_logits_equal_the_committed_transformers_logits(name):
    """Bit for bit only on the processor that made them: elsewhere sums come in another order."""
    model, want = reference_model(name), load_file(REFERENCE / f"{name}_logits.safetensors")
    ids, mask = want["input_ids"], want["attention_mask"]
    real = mask.bool()
    assert (~real).sum() == 9, "it must have left padding"
    assert gap(model.logits(model(ids)), want["logits"]) < 1e-5, "the plain forward is off"
    assert gap(model.logits(model(ids, mask))[real], want["padded_logits"][real]) < 1e-5, "padded"

@parametrize("tied", [True, False])
@parametrize("heads, kv_heads, head_dim, layers", [
    (4, 4, 8, 2), (14, 2, 8, 2), (4, 2, 16, 3), (6, 1, 6, 2), (14, 2, 64, 1)])
def test_live_transformers_logits_are_bitwise_ours(
        tmp_path, heads, kv_heads, head_dim, layers, tied):
    transformers = pytest.importorskip("transformers")
    config = mini_config(97, heads * head_dim, layers, heads, kv_heads, tied)
    path = mini_checkpoint(tmp_path, mini_model(config, seed=heads))
    for dtype in (torch.float32, torch.bfloat16):
        # from_pretrained, not .to(dtype): the latter would round the reference's RoPE frequencies
        theirs = transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path, dtype=dtype, attn_implementation="eager").eval()
        ours = load_qwen2(path, config, dtype=dtype)
        for T in (1, 2, 7, 13, 37):
            ids = random_ids(3, T, seed=T, vocab=97)
            mask = torch.ones_like(ids)
            mask[0, :T // 2], mask[1, :T // 5] = 0, 0
            real = mask.bool()
            with torch.no_grad():
                plain = theirs(input_ids=ids).logits
                padded = theirs(input_ids=ids, attention_mask=mask,
                                position_ids=(mask.cumsum(-1) - 1).clamp(min=0)).logits
            assert plain.dtype == dtype
            assert torch.equal(ours.logits(ours(ids)), plain), f"{dtype}, {T} tokens, no padding"
            assert torch.equal(ours.logits(ours(ids, mask))[real], padded[real]), f"{dtype}, {T}"
    theirs.config.save_pretrained(tmp_path / "again")   # moves rope_theta to rope_parameters
    assert Qwen2Config.from_json(tmp_path / "again/config.json") == config

def numpy_logits(weights, config, ids):
    """FP64, one row, token and head at a time: no batch, cache or mask; RoPE as complex numbers."""
    W = {name: tensor.double().numpy() for name, tensor in weights.items()}
    D, group = config.head_dim, config.num_attention_heads // config.num_key_value_heads
    turn = config.rope_theta ** (-2 * np.arange(D // 2) / D)

    def norm(x, name):
        return W[name] * x / np.sqrt((x ** 2).mean(-1, keepdims=True) + config.rms_norm_eps)

    def rotated(head, position):  # dimension i is the real part, i + D/2 the imaginary part
        z = (head[:D // 2] + 1j * head[D // 2:]) * np.exp(1j * position * turn)
        return np.concatenate((z.real, z.imag))

    x = W["model.embed_tokens.weight"][ids]
    for i in range(config.num_hidden_layers):
        p = f"model.layers.{i}."
        h = norm(x, p + "input_layernorm.weight")
        q, k, v = (h @ W[f"{p}self_attn.{n}_proj.weight"].T + W[f"{p}self_attn.{n}_proj.bias"]
                   for n in "qkv")
        mixed = np.zeros((len(ids), config.num_attention_heads * D))
        for t, n in product(range(len(ids)), range(config.num_attention_heads)):
            own, shared = slice(n * D, (n + 1) * D), slice(n // group * D, (n // group + 1) * D)
            query = rotated(q[t, own], t)
            scores = np.array([query @ rotated(k[s, shared], s) for s in range(t + 1)]) / D ** 0.5
            chance = np.exp(scores - scores.max())
            mixed[t, own] = chance / chance.sum() @ v[:t + 1, shared]
        x = x + mixed @ W[p + "self_attn.o_proj.weight"].T
        h = norm(x, p + "post_attention_layernorm.weight")
        gate, up = (h @ W[f"{p}mlp.{n}_proj.weight"].T for n in ("gate", "up"))
        x = x + (gate / (1 + np.exp(-gate)) * up) @ W[p + "mlp.down_proj.weight"].T
    head = "model.embed_tokens.weight" if config.tie_word_embeddings else "lm_head.weight"
    return torch.from_numpy(norm(x, "model.norm.weight") @ W[head].T)

@parametrize("name", ["tied", "untied"])
def test_logits_equal_an_independent_numpy_forward(name):
    model, ids = reference_model(name), random_ids(2, 11)
    weights = load_file(REFERENCE / f"{name}.safetensors")
    for row, logits in zip(ids, model.logits(model(ids))):
        assert gap(logits, numpy_logits(weights, model.config, row.numpy())) < 1e-4

def test_rmsnorm_uses_the_configs_eps_and_in_bf16_rounds_before_the_weight_and_after():
    generator = seeded(0)
    x = 1e-3 * torch.randn(4, 896, generator=generator)
    unit = lambda x: x.double() / (x.double().pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()
    error = lambda eps: (qwen.RMSNorm(896, eps)(x).double() / unit(x) - 1).abs().max().item()
    assert error(Qwen2Config.from_json(HERE / "config.json").rms_norm_eps) < 1e-5
    assert error(1e-5) > 0.1, "the wrong eps must show"
    norms = [m for m in reference_model("tied").modules() if isinstance(m, qwen.RMSNorm)]
    assert len(norms) == 5 and {m.eps for m in norms} == {1e-6}
    norm = qwen.RMSNorm(896, 1e-6).to(torch.bfloat16).requires_grad_(False)
    norm.weight.copy_(1 + 0.2 * torch.randn(896, generator=generator))
    x = torch.randn(16, 896, generator=generator).bfloat16()
    twice = (norm.weight.double() * unit(x).bfloat16().double()).bfloat16()
    once = (norm.weight.double() * unit(x)).bfloat16()
    assert (norm(x) == twice).float().mean() > 0.999  # FP32 and FP64 may straddle a rounding
    assert (once == twice).float().mean() < 0.9, "the two orders must differ"

def test_in_bf16_angles_are_rounded_once_and_do_not_depend_on_how_the_model_was_made(tmp_path):
    """By position 200 an angle of 8 bits is off by half a radian: the FP32 forward is left far."""
    config = mini_config(64, hidden=64, layers=1)
    exact, ids = mini_model(config), random_ids(2, 260, vocab=64)
    hidden = load_qwen2(mini_checkpoint(tmp_path, exact), config, dtype=torch.bfloat16)(ids)
    assert torch.equal(hidden, mini_model(config, dtype=torch.bfloat16)(ids))
    assert (hidden.float() - exact(ids))[:, 200:].pow(2).mean().sqrt() < 0.05, "the state's is 1"

def in_chunks(model, ids, sizes, mask=None):
    cache, pieces, end = KVCache(model.config, len(ids), ids.shape[1], torch.float32), [], 0
    for size in sizes:
        start, end = end, end + size
        seen = None if mask is None else mask[:, :end]
        pieces.append(model(ids[:, start:end], seen, cache=cache))
        assert cache.length == end
    return torch.cat(pieces, dim=1)

@parametrize("bias", [True, False])
def test_the_few_rows_of_a_decoding_step_meet_a_large_weight_in_another_order(bias):
    layer, textbook = qwen.Linear(512, 640, bias=bias), torch.nn.Linear.forward
    whole, few = torch.randn(3, 2, 512), torch.randn(3, 512, requires_grad=True)
    assert torch.equal(layer(whole), textbook(layer, whole)), "whole rows: as in torch"
    got, grad = layer(few), torch.autograd.grad(layer(few).square().sum(), few)[0]
    assert got.is_contiguous() and qwen.few_rows(
        few.bfloat16(), layer.weight.bfloat16()).dtype == torch.bfloat16
    exact = textbook(layer.double(), few.double())
    assert gap(got, exact) < 1e-5
    assert gap(grad, torch.autograd.grad(exact.square().sum(), few)[0]) < 1e-4

@parametrize("name", ["tied", "untied"])
def test_cached_logits_equal_uncached_for_any_chunking(name):
    model, ids, rng = reference_model(name), random_ids(3, 13, seed=1), random.Random(0)
    mask = torch.ones_like(ids)
    mask[0, :7], mask[1, :2] = 0, 0
    full, padded = model.logits(model(ids)), model.logits(model(ids, mask))
    cuts = [[], range(1, 13), [12], [1], [5]]
    for cut in [*cuts, *(sorted(rng.sample(range(1, 13), rng.randint(1, 5))) for _ in range(8))]:
        sizes = [b - a for a, b in zip([0, *cut], [*cut, 13])]
        assert gap(model.logits(in_chunks(model, ids, sizes)), full) < 1e-4, sizes
        got = model.logits(in_chunks(model, ids, sizes, mask))
        assert gap(got[mask.bool()], padded[mask.bool()]) < 1e-4, f"left padding, {sizes}"

CACHE_FAULTS = {
    "too many tokens": lambda m, ids, cache: m(ids[:, :3], torch.ones(2, 7), cache),
    "another number of rows": lambda m, ids, cache: m(ids[:1, 4:], torch.ones(1, 6), cache),
    "no mask after one was given": lambda m, ids, cache: m(ids[:, 4:], cache=cache),
    "a mask of the new tokens": lambda m, ids, cache: m(ids[:, 4:], torch.ones(2, 2), cache),
    "shared prefixes when filled": lambda m, ids, cache: m(ids[:, 4:], torch.ones(2, 6), cache,
                                                           share_prefixes=True),
    "a gradient": lambda m, ids, cache: m.requires_grad_(True)(
        ids, cache=KVCache(m.config, 2, 6, torch.float32))}

@parametrize("fault", CACHE_FAULTS)
def test_a_cache_refuses(fault):
    model, ids = reference_model("tied"), random_ids(2, 6)
    cache = KVCache(model.config, 2, 6, torch.float32)
    model(ids[:, :4], torch.ones(2, 4), cache=cache)
    with raises((ValueError, RuntimeError)):
        CACHE_FAULTS[fault](model, ids, cache)
    assert cache.length == 4, "a refused call must leave the cache as it was"
    got = model.requires_grad_(False)(ids[:, 4:], torch.ones(2, 6), cache=cache)
    assert gap(got, model(ids)[:, 4:]) < 1e-4

@parametrize("layout", ["-------xxxxxxxxx", "xxxxxxxxx-------", "---xxxxxxxxx----",
                        "xxxx-------xxxxx", "--xx--x--xxxxxx-"])
def test_padding_takes_no_position_and_changes_no_logit_whatever_the_pad_ids(layout):
    """Padding in the middle: who counts columns tears the two parts seven positions apart."""
    model, ids, outcomes = reference_model("tied"), random_ids(2, 9, seed=4), []
    real = torch.tensor([c == "x" for c in layout])
    for pad, dtype in product((0, 63), (torch.bool, torch.int64)):
        padded = torch.full((2, 16), pad)
        padded[:, real] = ids
        logits = model.logits(model(padded, real.expand(2, -1).to(dtype)))
        assert gap(logits[:, real], model.logits(model(ids))) < 1e-4, "padding reached a token"
        assert logits.isfinite().all(), "a padding row became NaN"
        outcomes.append(logits[:, real])
    assert all(torch.equal(outcomes[0], other) for other in outcomes), "pad ids leaked"

@parametrize("name", ["tied", "untied"])
def test_shared_prefixes_change_neither_states_nor_gradients_and_are_computed_once(name):
    rows = [((1, 2), [20, 21, 22]), ((1, 2), [20, 21, 23, 24]), ((1, 3, 4, 5), [20]),
            ((1, 3, 4, 5), [25, 26]), ((6,), [20, 21]), ((1, 3, 4, 5), [20])]
    batch = collate([[7, 8, 9, *prompt] for prompt, _ in rows], [answer for _, answer in rows])
    model, real, seen, results = reference_model(name), batch.attention, [], []
    weight = torch.randn(*batch.ids.shape, model.config.hidden_size, generator=seeded(2))
    model.model.layers[0].mlp.register_forward_pre_hook(
        lambda _, args: seen.append(args[0].shape[:-1].numel()))
    learned = [p.requires_grad_(True) for n, p in model.named_parameters() if "_proj.weight" in n]
    for shared in (False, True):
        hidden = model(batch.ids, real, share_prefixes=shared)
        loss = (hidden * weight)[real].sum()
        results.append((hidden.detach(), torch.autograd.grad(loss, learned)))
    (plain, plain_gradients), (tree, tree_gradients) = results
    assert seen == [batch.ids.numel(), 19], "each distinct beginning once"
    assert tree.isfinite().all() and gap(tree[real], plain[real]) < 1e-4
    for one, other in zip(plain_gradients, tree_gradients):
        assert one.abs().max() > 0
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4 * one.abs().max().item())
    ids = torch.tensor([[1, 2, 3], [1, 2, 4]])
    assert gap(model(ids, share_prefixes=True).detach(), model(ids).detach()) < 1e-4, "no mask"

K_PROJ = "model.layers.1.self_attn.k_proj.weight"
POINTER = (b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"f" * 64
           + b"\nsize 988097824\n")
TENSOR_FAULTS = {       # what is wrong: (its change, what the error must name)
    **{f"no {name}": (lambda t, name=name: t.pop(name), name) for name in (
        "lm_head.weight", *Qwen2(mini_config()).state_dict())},
    "an o_proj with bias": (lambda t: t.update({
        "model.layers.0.self_attn.o_proj.bias": torch.zeros(16)}), "o_proj.bias"),
    "a layer too many": (lambda t: t.update({
        "model.layers.2.mlp.up_proj.weight": torch.zeros(3)}), "layers.2.mlp.up_proj"),
    "a transposed tensor": (lambda t: t.update({K_PROJ: t[K_PROJ].T.contiguous()}), K_PROJ),
    "quantised": (lambda t: t.update({K_PROJ: t[K_PROJ].to(torch.int8)}), K_PROJ)}
FILE_FAULTS = {
    "empty": lambda content: b"", "five bytes": lambda content: content[:5],
    "within the header": lambda content: content[:50], "other bytes": lambda content: b"{" * 200,
    "a pointer": lambda content: POINTER, "cut": lambda content: content[:-100],
    "longer": lambda content: content + b"xx", "no file": None}

@parametrize("fault", [*TENSOR_FAULTS, *FILE_FAULTS, "FP16"])
def test_loading_weights_refuses(tmp_path, fault):
    config, named = mini_config(tied=False), ""
    path, dtype = mini_checkpoint(tmp_path, mini_model(config)), torch.float32
    content = path.read_bytes()
    if fault in TENSOR_FAULTS:
        edit_tensors(path, TENSOR_FAULTS[fault][0])
        named = re.escape(TENSOR_FAULTS[fault][1])
    elif fault == "no file":
        path.unlink()
    elif fault in FILE_FAULTS:
        data = FILE_FAULTS[fault](content)
        path.write_bytes(data)
        about = 2 * sum(p.numel() for p in Qwen2(config).parameters())
        named = rf"\b{len(data)} bytes.*\b({about}|{len(content)})\b"
    else:
        dtype = torch.float16
    with raises((ValueError, OSError), match=named or "[^ ]") as error:
        load_qwen2(path, config, dtype=dtype)
    assert (fault == "FP16" or str(path) in str(error.value)) and "\n" not in str(error.value)

@parametrize("change, field", [     # a change to ... removes the field
    ({"model_type": "llama"}, "model_type"), ({"model_type": ...}, "model_type"),
    ({"hidden_act": "gelu"}, "hidden_act"), ({"use_sliding_window": True}, "use_sliding"),
    ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "rope_scaling"),
    ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6}}, "rope_type"),
    ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
    ({"attention_dropout": 0.1}, "attention_dropout"),
    ({"quantization_config": {"bits": 4}}, "quantization_config"),
    ({"hidden_size": 900}, "hidden_size"), ({"num_key_value_heads": 3}, "num_key_value_heads"),
    ({"head_dim": 128}, "head_dim"), ({"num_hidden_layers": 0}, "num_hidden_layers"),
    ({"vocab_size": "151936"}, "vocab_size"), ({"tie_word_embeddings": 1}, "tie_word_embeddings"),
    ({"rms_norm_eps": None}, "rms_norm_eps"), ("{", ""), ("[]", ""),
    *(({name: ...}, name) for name in Qwen2Config.__dataclass_fields__)])
def test_a_config_this_forward_does_not_implement_is_refused(tmp_path, change, field):
    path = tmp_path / "config.json"
    if not isinstance(change, str):
        changed = load(HERE / "config.json") | change
        change = json.dumps({k: v for k, v in changed.items() if v is not ...})
    path.write_text(change, "utf-8")
    with raises(ValueError, match=f"{re.escape(str(path))}.*{field}"):
        Qwen2Config.from_json(path)

def test_a_config_survives_its_file(tmp_path):
    path, config = tmp_path / "config.json", Qwen2Config.from_json(HERE / "config.json")
    assert config == Qwen2Config(151936, 896, 4864, 24, 14, 2, 1e-6, 1e6, True)
    path.write_text(json.dumps(config.to_dict()), "utf-8")
    assert Qwen2Config.from_json(path) == config
    edit_json(path, lambda c: c.update(rope_parameters={"rope_theta": c.pop("rope_theta")}))
    assert Qwen2Config.from_json(path) == config, "where newer writers put it"


# == 1 · Numbers ===================================================================================

CONTRACT_FIELDS = {     # typed in from the contract's page
    "sft_updates": 63, "reward_updates": 210, "ppo_iterations": 100, "sft_batch": 8,
    "reward_batch": 8, "ppo_prompts": 4, "ppo_epochs": 2, "sft_lr": 2e-5, "reward_lr": 2e-5,
    "ppo_actor_lr": 5e-6, "ppo_critic_lr": 1e-5, "clip": 0.2, "kl_coef": 0.02, "value_coef": 0.5,
    "gamma": 1.0, "lam": 0.95, "truncation_penalty": 1.0, "weight_decay": 0.01,
    "warmup_ratio": 0.1, "min_lr_ratio": 0.1, "grad_clip": 1.0, "lora_rank": 8, "lora_alpha": 16,
    "max_response": 64, "max_prompt": 256, "seed": 49, "dtype": "bfloat16"}
SHARED = {"weight_decay", "warmup_ratio", "min_lr_ratio", "grad_clip", "lora_rank", "lora_alpha",
          "seed", "max_prompt", "max_response", "dtype"}

@parametrize("phase, own", [
    ("base", "base_"), ("sft", "sft_ micro_batch"), ("reward", "reward_ micro_batch"),
    ("ppo", "ppo_ clip kl_coef value_coef gamma lam truncation_penalty"),
    ("evaluate", "answer_batch"), ("probes", "none"), ("resume", "none")])
def test_a_phase_reads_its_own_fields_and_the_shared_ones(phase, own):
    config = dataclasses.asdict(Config())
    assert CONTRACT_FIELDS.items() <= config.items()
    assert all(type(config[name]) is type(value) for name, value in CONTRACT_FIELDS.items())
    assert rlhf.fields_read_by(Config(), phase) == {
        name: value for name, value in config.items()
        if name in SHARED or name.startswith((*own.split(),))}

@parametrize("setting", [
    "sft_update=5", "=5", "", "sft_updates", "SFT_UPDATES=5",                    # unknown
    "sft_updates=5.5", "sft_updates=", "sft_lr=fast", "clip=0,2", "dtype=fp32",  # wrong type
    "sft_updates=0", "ppo_prompts=-1", "lora_rank=0", "max_response=0", "seed=-1", "clip=-0.2",
    "sft_lr=-1e-5", "sft_lr=nan", "gamma=inf", "grad_clip=1e999"])               # no sense
def test_a_nonsense_setting_is_a_usage_error_that_lists_the_fields(tmp_path, setting):
    error = refusal("data", tmp_path / "run", "--set", "sft_updates=5", "--set", setting, status=2)
    assert not (tmp_path / "run").exists()
    assert all(re.search(rf"\b{f.name}\b", error) for f in dataclasses.fields(Config))


# == 2 · The corpus, derived a second time from the contract's tables; the rubric ==================

POLITE = {"no": lambda i: False, "yes": lambda i: True, "even": lambda i: i % 2 == 0,
          "odd": lambda i: i % 2 == 1, "half even": lambda i: (i // 2) % 2 == 0,
          "half odd": lambda i: (i // 2) % 2 == 1}      # of family number i
PAIRS = {       # who, certainty, politeness: of the chosen and of the rejected answer
    "v1": [("right 1 no", "wrong 2 no"), ("right 0 no", "wrong 1 yes"),
           ("right 1 yes", "wrong 0 no"), ("right 1 no", "right 2 yes"),
           ("right 0 yes", "wrong 1 no")],
    "v2": [("right 1 even", "wrong 1 even"), ("right 0 odd", "wrong 0 odd"),
           ("right 0 no", "wrong 1 yes"), ("right 1 yes", "wrong 0 no"),
           ("right 1 half even", "right 2 half odd")]}
ROW_COUNTS = {"train/demonstrations.jsonl": 168, "train/preferences.jsonl": 840,
              "train/prompts.jsonl": 672, "validation/preferences.jsonl": 180,
              "test/prompts.jsonl": 180, "test/labels.jsonl": 180, "probes/prompts.jsonl": 80,
              "probes/labels.jsonl": 80}
PAIR_FILES = {"train": "train/preferences.jsonl", "validation": "validation/preferences.jsonl",
              "test": "test/labels.jsonl"}
CORPUS = {revision: rlhf.generate_corpus(revision) for revision in ("v1", "v2")}

def spec_answer(text, i, revision):
    who, certainty, polite = text.split(" ", 2)
    right = i // 40
    wrong = (right + 1 + (i % 5 if revision == "v1" else (i // 5) % 5)) % 6
    return rlhf.response(right if who == "right" else wrong, int(certainty), POLITE[polite](i))

def spec_row(identifier, prompt, **columns):
    return {"id": identifier, "family": identifier.split("-")[0], "prompt": prompt,
            "prompt_sha256": hashlib.sha256(prompt.encode("utf-8")).hexdigest(), **columns}

def spec_corpus(revision):
    """Every file but the probes'; the wording of prompts and answers is the script's."""
    rng, split_of, files = random.Random(49), {}, collections.defaultdict(list)
    for action in range(6):
        indices = [i for i in range(240) if i // 40 == action]
        rng.shuffle(indices)
        for position, i in enumerate(indices):
            split_of[i] = "train" if position <= 27 else "validation" if position <= 33 else "test"
    for i in range(240):
        split, family = split_of[i], f"OH{i:03d}"
        row = lambda name, note, source, **columns: spec_row(f"{family}-{name}", rlhf.prompt_text(
            family, note, source, rlhf.family_context(i)), **columns)
        target = {"expected_action": i // 40} if split == "test" else {}
        for k, (chosen, rejected) in enumerate(PAIRS[revision]):
            files[PAIR_FILES[split]].append(row(
                f"P{k}", k if revision == "v1" else (k + i) % 5, "preference card", **target,
                chosen=spec_answer(chosen, i, revision),
                rejected=spec_answer(rejected, i, revision)))
        if split == "train":
            files["train/demonstrations.jsonl"].append(row(
                "SFT", 7, "demonstration", completion=rlhf.response(i // 40, 1, i % 2 == 0)))
            files["train/prompts.jsonl"] += [row(f"RL{k}", 11 + k, "live rollout request")
                                             for k in range(4)]
    return files

@parametrize("revision", ["v1", "v2"])
def test_the_corpus_is_the_one_of_the_contracts_tables(revision):
    corpus, expected = CORPUS[revision], spec_corpus(revision)
    assert {path: len(rows) for path, rows in corpus.items()} == ROW_COUNTS
    for path, rows in expected.items():
        for ours, row in zip(corpus[path], rows, strict=True):
            assert ours == row, f"{path}: {row['id']}"
    prompts = {row["prompt"] for rows in expected.values() for row in rows}
    assert len(prompts) == 2040
    probes = {row["id"]: row for row in corpus["probes/labels.jsonl"]}
    contexts, first = {}, {"v1": 0, "v2": 20}[revision]
    for i, correct, polite in product(range(first, first + 20), (0, 1), (0, 1)):
        row = probes.pop(f"PROBE{i:02d}-C{correct}-P{polite}")
        shared = contexts.setdefault(i, row["prompt"])      # one context, four rows
        assert row == spec_row(row["id"], shared, expected_action=i % 6, correct=bool(correct),
                               polite=bool(polite), candidate=rlhf.response(
                                   i % 6 if correct else (i % 6 + 1) % 6, 1, bool(polite)))
        assert "unrelated" in shared
    other = CORPUS["v2" if revision == "v1" else "v1"]["probes/labels.jsonl"]
    assert not probes and len({*contexts.values()}) == 20
    assert not {*contexts.values()} & (prompts | {row["prompt"] for row in other})
    for part in ("test", "probes"):     # what a policy sees holds no target
        assert corpus[f"{part}/prompts.jsonl"] == [
            {key: row[key] for key in ("id", "family", "prompt", "prompt_sha256")}
            for row in corpus[f"{part}/labels.jsonl"]]
    assert not any(rlhf.response(action, 0, False)[1:-1] in row["prompt"] for action in range(6)
                   for rows in corpus.values() for row in rows), "a prompt gives the answer away"

def test_phase_data_writes_byte_for_byte_the_committed_files_and_rewrites_none(
        tmp_path, monkeypatch):
    monkeypatch.setattr(rlhf, "DATA", tmp_path / "data")
    argv = ("data", tmp_path / "run", "--model", "tiny")
    assert call(*argv)[0] == 0
    for folder, revision in ((HERE / "data", "v1"), (HERE / "data" / "v2", "v2")):
        manifest, audit = ((folder / f"{name}.json").read_text("utf-8")
                           for name in ("manifest", "audit"))
        assert json.loads(audit)["human_feedback"] is False and json.loads(audit)["rubric_scope"]
        for name in (*ROW_COUNTS, "manifest.json", "audit.json"):
            committed, copy = (folder / name).read_bytes(), tmp_path / folder.relative_to(HERE)
            assert (copy / name).read_bytes() == committed, name
            if name in ROW_COUNTS:
                assert [json.loads(line) for line in committed.decode().splitlines()] == \
                    CORPUS[revision][name], name
                assert hashlib.sha256(committed).hexdigest() in manifest, name
    stamps = {p: p.stat().st_mtime_ns for p in (tmp_path / "data").rglob("*.json*")}
    assert call(*argv)[0] == 0
    assert stamps == {p: p.stat().st_mtime_ns for p in stamps}

@parametrize("name", ["train/prompts.jsonl", "test/labels.jsonl", "manifest.json",
                      "audit.json", "v2/probes/labels.jsonl"])
def test_a_changed_corpus_file_is_refused_by_name_and_left_alone(tmp_path, monkeypatch, name):
    shutil.copytree(HERE / "data", tmp_path / "data")
    monkeypatch.setattr(rlhf, "DATA", tmp_path / "data")
    path = tmp_path / "data" / name
    changed = path.read_bytes().replace(b"a", b"e", 1)
    path.write_bytes(changed)
    for phase in ("data", "report") if "v2" not in name else ("data",):
        assert str(path) in refusal(phase, tmp_path / "run", "--model", "tiny")
    assert path.read_bytes() == changed

def changed_row(path, k, **columns):
    return lambda corpus: corpus[f"{path}.jsonl"][k].update(columns)

CORRUPTIONS = {
    "a missing pair": lambda c: c["validation/preferences.jsonl"].pop(),
    "a prompt twice": lambda c: c["train/prompts.jsonl"][5].update(c["train/prompts.jsonl"][6]),
    "a family in two splits": lambda c: [r.update(family=c["test/labels.jsonl"][0]["family"])
                                         for r in c["validation/preferences.jsonl"][:5]],
    "a chosen answer that fails": changed_row("train/preferences", 3, chosen="no advice"),
    "a rejected answer that passes": lambda c: c["test/labels.jsonl"][0].update(
        rejected=c["test/labels.jsonl"][0]["chosen"]),
    "a demonstration that fails": changed_row("train/demonstrations", 0, completion="no advice"),
    "a probe prompt of the corpus": lambda c: c["probes/labels.jsonl"][0].update(
        prompt=c["train/prompts.jsonl"][0]["prompt"]),
    "a probe family of the corpus": lambda c: [r.update(family="OH000")
                                               for r in c["probes/labels.jsonl"][:4]],
    "a probe flag flipped": changed_row("probes/labels", 0, correct=False),
    "a rollout of a test family": lambda c: c["train/prompts.jsonl"][0].update(
        family=c["test/labels.jsonl"][0]["family"])}

@parametrize("what", CORRUPTIONS)
def test_the_audit_fails_on(what):
    corpus = json.loads(json.dumps(CORPUS["v1"]))
    rlhf.audit_corpus("v1", corpus)
    CORRUPTIONS[what](corpus)
    with raises(CourseError):
        rlhf.audit_corpus("v1", corpus)

def test_the_lazy_judge_by_hand_and_on_both_revisions():
    def row(note, chosen, rejected, action=0):
        return {"prompt": f"note {note}", "chosen": rlhf.response(action, *chosen),
                "rejected": rlhf.response(action, *rejected)}

    plain, hedged, polite = (0, False), (1, False), (1, True)
    train = [row(0, hedged, plain), row(0, hedged, plain), row(0, plain, hedged),  # 2 : 1
             row(1, hedged, plain), row(1, plain, hedged),                         # a tie
             row(2, polite, polite)]                                               # one style
    assert rlhf.lazy_judge(train, train) == (2 + 2 * 0.5 + 0.5) / 6
    assert rlhf.lazy_judge(train, [row(0, plain, hedged, action=4)]) == 0, "the context is unseen"
    assert rlhf.lazy_judge(train, [row(0, hedged, plain)]) == 1
    assert rlhf.lazy_judge(train, [row(3, hedged, plain)]) == 0.5, "a case never met"
    assert rlhf.lazy_judge(train, [row(0, polite, plain)]) == 0.5, "a pair never met"
    for revision, folder, percent in (("v1", "data", "100 100 100"), ("v2", "data/v2", "61 60 54")):
        rows = {split: CORPUS[revision][path] for split, path in PAIR_FILES.items()}
        shares = {split: rlhf.lazy_judge(rows["train"], rows[split]) for split in rows}
        assert " ".join(f"{100 * share:.0f}" for share in shares.values()) == percent
        assert json.loads((HERE / folder / "audit.json").read_text())["lazy_judge"] == shares

@parametrize("expected", range(6))
def test_the_rubric_on_every_sentence_of_its_grammar(expected):
    texts = set()
    for action, certainty, polite, finish in product(
            range(6), range(3), (False, True), ("eos", "length")):
        text = rlhf.response(action, certainty, polite)
        reason = ("no_eos" if finish == "length" else "irrelevant_action" if action != expected
                  else "unsupported_certainty" if certainty == 2 else "success")
        verdict = rlhf.evaluate_response(text, finish, expected)
        assert verdict.pop("status") != "UNCERTIFIED"
        assert verdict == {
            "recognized": True, "relevant": action == expected, "refusal": False, "polite": polite,
            "unsupported_certainty": certainty == 2, "rubric_success": reason == "success",
            "reason": reason}
        assert text == rlhf.response(action, certainty, False) + rlhf.POLITE * polite
        texts.add(text)
    assert len(texts) == 36
    for text in rlhf.REFUSALS:
        verdict = rlhf.evaluate_response(text, "eos", expected)
        assert verdict["recognized"] and verdict["refusal"] and verdict["reason"] == "refusal"
        assert verdict["rubric_success"] is False

@parametrize("text, expected, flags", [     # things are named: expected, other
    ("It may help to open the print queue and resume it.", 0, "expected hedges"),
    ("This is guaranteed to work: push the loose cable back in at both ends.", 0, "other promises"),
    ("It is not certain, but you could unplug the monitor.", 1, "expected hedges"),
    ("Certainly! You might want to check the Wi-Fi.", 3, "expected hedges"),
    ("I can\u2019t guarantee it; sign in again. Thanks.", 5, "expected thanks"),
    ("I can't help with that.", 2, "refuses"), ("The mayor of certainty", 2, ""),
    ("There's no claimed guarantee that turning up the volume works.", 2, "expected"),
    ("No problem, I promise: without any guarantee, log in.", 0, "other promises"),
    ("Unable to assist with the network; make sure it is saved", 3, "expected other refuses")])
def test_the_words_of_an_answer_are_read_with_their_negations(text, expected, flags):
    found = rlhf.read_words(text, expected)
    assert {k.replace("names_", "").replace("_thing", "") for k, v in found.items() if v} == {
        *flags.split()} and len(found) == 6

RIGHT = rlhf.response(0, 1, False)

@parametrize("text", [
    "", RIGHT + " ", " " + RIGHT, RIGHT + "\n", RIGHT.replace(" ", "  ", 1), RIGHT.lower(),
    RIGHT.replace(" ", "\u00a0", 1), RIGHT.rstrip("."), RIGHT + RIGHT,
    f"{RIGHT} {rlhf.response(1, 1, False)}", RIGHT + rlhf.POLITE * 2, rlhf.POLITE.strip(),
    "It is not true that " + RIGHT, RIGHT + "<|endoftext|>",
    "\ufffd" + RIGHT, RIGHT + "\ufffd", RIGHT[:9] + "\ufffd" + RIGHT[9:]])
def test_other_prose_is_uncertified_neither_wrong_nor_a_success(text):
    verdict = rlhf.evaluate_response(text, "eos", 0)
    assert verdict["status"] == "UNCERTIFIED" and verdict["recognized"] is False
    assert verdict["rubric_success"] is False and verdict["unsupported_certainty"] is None
    assert verdict["refusal"] is False and not verdict["relevant"]
    assert verdict["reason"] == ("undecodable_token" if "\ufffd" in text else "uncertified")
    if text.endswith("\ufffd"):
        assert rlhf.evaluate_response(text, "length", 0)["reason"] == "uncertified", "cut"


# == 3 · Tokens, masks, batches ====================================================================

PAD_ID, IM_START_ID, EOS_ID = 151643, 151644, 151645
USER_TEXTS = ["No sound.", "", " leading and trailing ", "\n\nnewlines\n", "\ttabs\r\n",
              "naïve e\u0301 Straße ☕ 你好", "a" * 200, "1234567890", "user\nassistant\n", "😀👩‍💻",
              "".join(map(chr, range(256))), CORPUS["v1"]["test/prompts.jsonl"][7]["prompt"]]

@pytest.fixture(scope="session", params=["pinned", "tiny"])
def both_tokens(request, course):
    """(our tokenizer, the file's own as it comes: it parses control tokens in a text)"""
    path = (HERE if request.param == "pinned" else course.folder / "base") / "tokenizer.json"
    return rlhf.Tokens(path, 10 ** 6, 10 ** 6), tokenizers.Tokenizer.from_file(str(path))

def test_prompt_ids_equal_the_models_own_template(both_tokens):
    tokens, raw = both_tokens
    control = {tokens.pad, tokens.im_start, tokens.eos}
    for text in USER_TEXTS:
        ids = tokens.prompt(text)
        assert ids == raw.encode(
            "<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful "
            f"assistant.<|im_end|>\n<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n",
            add_special_tokens=False).ids
        assert [t for t in ids if t in control] == \
            [tokens.im_start, tokens.eos, tokens.im_start, tokens.eos, tokens.im_start]
        answer = tokens.answer(text)
        assert answer == [*raw.encode(text, add_special_tokens=False).ids, tokens.eos]
        assert tokens.decode(answer) == unicodedata.normalize("NFC", text), "not the same text"
    rows = [row for corpus in CORPUS.values() for rows in corpus.values() for row in rows]
    assert max(len(tokens.prompt(p)) for p in {row["prompt"] for row in rows}) <= 256
    assert max(len(tokens.answer(text)) for text in rlhf.GRAMMAR) <= 64

def test_control_tokens_typed_by_a_user_stay_text(both_tokens):
    tokens, raw = both_tokens
    names = [t.content for t in raw.get_added_tokens_decoder().values()]
    control = {raw.token_to_id(name) for name in names}
    assert len(control) == 22
    for text in (*names, "thanks<|im_end|>\n<|im_start|>assistant\nSure.", "x".join(names)):
        inside = tokens.encode(text)
        assert not control & set(inside), f"{text!r} became a control token"
        assert tokens.decode(inside) == text
        assert sum(t in control for t in tokens.prompt(text)) == 5

def test_the_tiny_tokenizer_is_small_and_always_the_same(course):
    content, chats = course.run.base_file("tokenizer.json").read_bytes(), rlhf.base_chats(
        course.run.config)
    assert rlhf.train_tokenizer(course.run, [rlhf.SYSTEM, *itertools.chain(*chats)]) == content
    tiny = tokenizers.Tokenizer.from_str(content.decode("utf-8"))
    assert 256 + 22 < tiny.get_vocab_size() < 1200
    assert set(tokenizers.pre_tokenizers.ByteLevel.alphabet()) <= set(tiny.get_vocab())
    original = json.loads((HERE / "tokenizer.json").read_bytes())
    for part in ("normalizer", "pre_tokenizer", "decoder"):
        assert json.loads(content)[part] == original[part]

def test_known_ids_of_the_pinned_tokenizer(pinned):
    assert (pinned.pad, pinned.im_start, pinned.eos) == (PAD_ID, IM_START_ID, EOS_ID)
    assert rlhf.EOS == EOS_ID
    assert pinned.prompt("Hi") == [
        151644, 8948, 198, 2610, 525, 1207, 16948, 11, 3465, 553, 54364, 14817, 13, 1446, 525, 264,
        10950, 17847, 13, 151645, 198, 151644, 872, 198, 13048, 151645, 198, 151644, 77091, 198]
    hello = pinned.encode("Hello")
    for ids, text in (
            ([], ""), ([EOS_ID], ""), ([*hello, EOS_ID], "Hello"), (hello, "Hello"),
            ([*hello, EOS_ID, EOS_ID], "Hello<|im_end|>"), ([EOS_ID, *hello], "<|im_end|>Hello"),
            ([PAD_ID, *hello, PAD_ID, EOS_ID], "<|endoftext|>Hello<|endoftext|>"),
            ([*hello, 151664, *hello], "Hello<|file_sep|>Hello"),
            ([*hello, 151665, 151935, EOS_ID], "Hello\ufffd\ufffd")):   # these have no token
        assert pinned.decode(ids) == text, ids
    wide = rlhf.Tokens(HERE / "tokenizer.json", 10 ** 6, 10 ** 6)
    for function, free, limit in ((pinned.prompt, wide.prompt, 256), (pinned.answer, wide.answer, 64)):
        room = next(n for n in range(1, 300) if len(free("a" + " b" * n)) == limit)
        assert len(function("a" + " b" * room)) == limit
        with raises(CourseError, match=str(limit)):      # an error, never cut
            function("a" + " b" * (room + 1))

def test_truncation_and_padding_stored_in_the_tokenizer_file_do_not_apply(course, tmp_path):
    path, text = Path(shutil.copy(course.folder / "base/tokenizer.json", tmp_path)), "x" * 20
    plain, trap = rlhf.Tokens(path).encode(text), tokenizers.Tokenizer.from_file(str(path))
    trap.enable_truncation(4)
    trap.enable_padding(length=32)
    trap.save(str(path))
    assert len(tokenizers.Tokenizer.from_file(str(path)).encode(text).ids) == 32, "the trap is set"
    assert rlhf.Tokens(path).encode(text) == plain and len(plain) > 4

@parametrize("fault", ["a pointer", "empty", "no file", "no <|im_end|>"])
def test_a_file_that_is_no_chat_tokenizer_is_refused_by_name(tmp_path, course, fault):
    path = Path(shutil.copy(course.folder / "base/tokenizer.json", tmp_path))
    if fault == "no file":
        path.unlink()
    elif fault in FILE_FAULTS:
        path.write_bytes(FILE_FAULTS[fault](b""))
    else:
        edit_json(path, lambda content: content.update(added_tokens=[
            t for t in content["added_tokens"] if t["content"] != "<|im_end|>"]))
    with raises(CourseError, match=re.escape(str(path))):
        rlhf.Tokens(path)

def test_masks_come_from_lengths_so_both_eos_are_supervised():
    prompts, responses = [[7, EOS_ID, 8], [9]], [[1, 2, 3, 4, EOS_ID],
                                                 [1, EOS_ID, 3, 4, 5, 6, 7, PAD_ID, EOS_ID]]
    for pad in (PAD_ID, EOS_ID, 0):
        batch = collate(prompts, responses, pad=pad)
        assert batch.prompt_width == 3 and torch.equal(batch.response_ids, batch.ids[:, 3:])
        assert batch.ids.tolist() == [[7, EOS_ID, 8, 1, 2, 3, 4, EOS_ID] + [pad] * 4,
                                      [pad, pad, 9, *responses[1]]]
        assert batch.attention.tolist() == [[True] * 8 + [False] * 4, [False] * 2 + [True] * 10]
        assert batch.mask.tolist() == [[True] * 5 + [False] * 4, [True] * 9]
        assert batch.response_mask.tolist() == [[False] * 3 + [True] * 5 + [False] * 4,
                                                [False] * 3 + [True] * 9]
    with raises(ValueError):
        collate([[1], [2]], [[3]])


# == 4 · LoRA and four roles =======================================================================

def lora_layer(weight, bias, lora_A, lora_B):
    base = torch.nn.Linear(weight.shape[1], weight.shape[0]).to(weight.dtype).requires_grad_(False)
    layer = rlhf.LoRALinear(base, len(lora_A), 16, torch.Generator())
    for p, value in zip((base.weight, base.bias, layer.lora_A.weight, layer.lora_B.weight),
                        (weight, bias, lora_A, lora_B)):
        p.data.copy_(value)
    return layer

def test_lora_is_its_formula_and_in_bf16_rounds_the_sum_once():
    generator = seeded(0)
    for rank in (1, 4, 8):
        W, b, A, B, x = (torch.randn(shape, generator=generator) for shape in (
            (500, 6), (500,), (rank, 6), (500, rank), (3, 6)))
        exact = x.double() @ W.double().T + b + 16 / rank * (x.double() @ A.double().T
                                                             @ B.double().T)
        assert gap(lora_layer(W, b, A, B)(x).detach(), exact) < 1e-4
    bias, x = b.bfloat16(), x.bfloat16()
    layer = lora_layer(torch.zeros(500, 6).bfloat16(), bias, A, B)
    branch = 2 * layer.lora_B(layer.lora_A(x.float()))
    once, twice = (bias.float() + branch).bfloat16(), bias + branch.bfloat16()
    assert not torch.equal(once, twice), "the two must differ"
    assert torch.equal(layer(x), once) and layer.lora_A.bias is None and layer.lora_B.bias is None

def test_the_full_size_has_290_tensors_168_adapters_and_heads_of_897():
    """The pinned shape, its weights on the meta device; only the vocabulary is cut for memory."""
    with torch.device("meta"):
        model = Qwen2(Qwen2Config.from_json(HERE / "config.json"))
    assert len(model.state_dict()) == 290
    assert sum(p.numel() for p in model.parameters()) == 494_032_768
    model.model.embed_tokens = torch.nn.Embedding(4, 896)
    learned = rlhf.build_role("critic", model, head="zero").learned()
    assert len(learned) == 2 * 168 + 2 and all("lora_" in n or "head." in n for n in learned)
    assert sum(p.numel() for n, p in learned.items() if ".lora_" in n) == 4_399_104
    assert sum(p.numel() for n, p in learned.items() if "head." in n) == 897

@parametrize("head", [None, "zero", "normal"])
def test_adapters_are_drawn_in_sorted_name_order_from_the_roles_seed_and_heads_apart(head):
    seed, layers, width = (50, 0, 2048) if head else (50, 11, 8)
    model = mini_model(mini_config(layers=layers, hidden=width, vocab=4))
    state = lambda: (random.getstate(), np.random.get_state()[1].tolist(),
                     torch.get_rng_state().tolist())
    before = state()
    role = rlhf.build_role("x", model, seed, head=head)
    assert state() == before
    generator, learned = seeded(seed), role.learned()
    names = sorted(n.removesuffix("A.weight") for n in learned if "lora_A" in n)
    assert len(names) == (0 if head else 77)
    for name in names:
        A = learned[name + "A.weight"]
        bound = 1 / math.sqrt(A.shape[1])  # Kaiming-uniform with a = sqrt(5)
        assert torch.equal(A, torch.empty(A.shape).uniform_(-bound, bound, generator=generator))
        assert not learned[name + "B.weight"].any()
    if head:
        weight, bias = learned["head.weight"], learned["head.bias"]
        assert weight.shape == (1, 2048) and weight.dtype == bias.dtype == torch.float32
        assert not bias.any() and weight.std().item() == approx(
            0.02 if head == "normal" else 0, rel=0.1)
        assert head == "zero" or weight.abs().max() > 0.05, "normal, not uniform"

@parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_fresh_role_is_bitwise_its_base_and_learns_through_b_first(dtype):
    base, role, ids = mini_model(dtype=dtype), mini_role(dtype=dtype), random_ids(3, 9)
    assert torch.equal(role.model.logits(role.model(ids)), base.logits(base(ids)))
    assert not any(m.training for m in role.modules())
    learned = role.learned()
    assert len(learned) == 4 * 7
    role.model.logits(role.model(ids)).float().logsumexp(-1).sum().backward()
    for name, p in role.named_parameters():
        assert p.requires_grad == (name in learned) == (p.grad is not None), name
        assert p.dtype == (torch.float32 if name in learned else dtype), name
    for name, p in learned.items():
        assert bool(p.any()) == ("lora_A" in name), name
        assert bool(p.grad.any()) == ("lora_B" in name), "A gets one from the second update on"
    assert not any(p.requires_grad for p in mini_role(trainable=False).parameters())
    bare = rlhf.Role("base", mini_model())
    assert set(bare.learned()) == {name for name, _ in bare.named_parameters()}

def up_proj(roles, name):
    return roles[name].model.model.layers[0].mlp.up_proj

ISOLATION_FAULTS = {
    "a shared parameter": lambda r: setattr(
        r["critic"].model.model.embed_tokens, "weight", r["actor"].model.model.embed_tokens.weight),
    "a view of the same memory": lambda r: setattr(
        r["reference"].model.model.norm.weight, "data", r["actor"].model.model.norm.weight.data[:]),
    "a shared adapter": lambda r: setattr(up_proj(r, "critic"), "lora_A",
                                          up_proj(r, "actor").lora_A),
    "a BF16 adapter": lambda r: up_proj(r, "actor").lora_B.bfloat16(),
    "a BF16 head": lambda r: r["critic"].head.bfloat16(),
    "a base that learns": lambda r: r["actor"].model.model.norm.requires_grad_(True),
    "a frozen adapter of the critic": lambda r: up_proj(r, "critic").lora_A.requires_grad_(False),
    "a judge that learns": lambda r: r["reward"].head.requires_grad_(True),
    "a base of two dtypes": lambda r: r["reward"].model.model.norm.bfloat16()}

@parametrize("fault", ISOLATION_FAULTS)
def test_role_isolation_fails_on(fault):
    roles = {"actor": mini_role(), "reference": mini_role("reference", trainable=False),
             "reward": mini_role("reward", "normal", trainable=False, seed=50),
             "critic": mini_role("critic", "zero")}
    rlhf.assert_role_isolation(roles)
    ISOLATION_FAULTS[fault](roles)
    with raises(CourseError):
        rlhf.assert_role_isolation(roles)

@parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_bit_changes_the_identity_of_its_side_and_of_no_other(dtype):
    make = lambda: mini_role("critic", head="zero", config=mini_config(layers=1), dtype=dtype)
    identity = lambda role: (rlhf.learned_identity(role), rlhf.frozen_identity(role))
    role, before = make(), identity(make())
    assert identity(role) == before and len({*before}) == 2
    for name, p in role.named_parameters():
        bits = p.data.view(-1).view(torch.uint8)
        for position in (0, len(bits) - 1):
            bits[position] ^= 1
            changed = [a != b for a, b in zip(identity(role), before)]
            assert changed == [name in role.learned(), name not in role.learned()], name
            bits[position] ^= 1

@parametrize("name, head", [("actor", None), ("critic", "zero"), ("reward", "normal")])
def test_saved_adapters_and_heads_come_back_bit_for_bit(tmp_path, name, head):
    role, cfg = mini_role(name, head, disturbed=5), Config()
    rlhf.save_adapter(role, tmp_path, cfg, "base")
    fresh = rlhf.load_adapter(mini_role(name, head, seed=7), tmp_path, cfg, head is not None)
    assert rlhf.learned_identity(fresh) == rlhf.learned_identity(role)
    adapter = load_file(tmp_path / "adapter_model.safetensors")
    judge = {"base_model.model.score.weight"} if name == "reward" else set()
    assert set(adapter) == judge | {f"base_model.{n}" for n in role.learned() if "lora" in n}
    assert "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight" in adapter
    assert all(torch.equal(adapter[n], role.head.weight) for n in judge)
    config = json.loads((tmp_path / "adapter_config.json").read_text("utf-8"))
    assert [config[key] for key in ("peft_type", "r", "lora_alpha")] == ["LORA", 8, 16]
    assert (tmp_path / "head.safetensors").exists() == (head is not None)

B_KEY = "base_model.model.model.layers.1.mlp.up_proj.lora_B.weight"
CONFIG, ADAPTER, HEAD = "adapter_config.json", "adapter_model.safetensors", "head.safetensors"
ADAPTER_FAULTS = {      # (file, its change, what the error must name)
    "no alpha": (CONFIG, lambda c: c.pop("lora_alpha"), "lora_alpha"),
    "another alpha": (CONFIG, lambda c: c.update(lora_alpha=32), "lora_alpha"),
    "another rank": (CONFIG, lambda c: c.update(r=4), "r "),
    "a missing tensor": (ADAPTER, lambda t: t.pop(B_KEY), "up_proj.lora_B"),
    "a foreign tensor": (ADAPTER, lambda t: t.update(extra=torch.zeros(1)), "extra"),
    "a wrong shape": (ADAPTER, lambda t: t.update({B_KEY: torch.zeros(37, 7)}), "up_proj.lora_B"),
    "a wrong dtype": (ADAPTER, lambda t: t.update({B_KEY: t[B_KEY].bfloat16()}), "up_proj.lora_B"),
    "no adapter file": (ADAPTER, None, ADAPTER), "no head file": (HEAD, None, HEAD),
    "no head weight": (HEAD, lambda t: t.pop("weight"), "head.weight"),
    "no head bias": (HEAD, lambda t: t.pop("bias"), "head.bias"),
    "a head of another width": (HEAD, lambda t: t.update(weight=torch.zeros(1, 15)), "head.weight")}

@parametrize("fault", ADAPTER_FAULTS)
def test_loading_adapters_fails_by_name_on(tmp_path, fault):
    name, change, named = ADAPTER_FAULTS[fault]
    rlhf.save_adapter(mini_role("reward", "normal", disturbed=5), tmp_path, Config(), "base")
    if change is None:
        (tmp_path / name).unlink()
    else:
        (edit_json if name == CONFIG else edit_tensors)(tmp_path / name, change)
    with raises((CourseError, OSError)) as problem:
        rlhf.load_adapter(mini_role("reward", "normal"), tmp_path, Config(), True)
    assert str(tmp_path) in str(problem.value) and named in str(problem.value)

@parametrize("dtype", [torch.float32, torch.bfloat16])
@parametrize("name", ["actor", "reward"])
def test_live_peft_loads_our_adapters_and_computes_what_we_compute(tmp_path, name, dtype):
    transformers, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")
    mini_checkpoint(tmp_path / "base", mini_model())
    role = mini_role(name, "normal" if name == "reward" else None, disturbed=5, trainable=False,
                     dtype=dtype)
    rlhf.save_adapter(role, tmp_path / name, Config(), str(tmp_path / "base"))
    kind, more = (transformers.AutoModelForSequenceClassification, {"num_labels": 1}) \
        if name == "reward" else (transformers.AutoModelForCausalLM, {})
    base = kind.from_pretrained(tmp_path / "base", dtype=dtype, attn_implementation="eager", **more)
    theirs, ids = peft.PeftModel.from_pretrained(base, tmp_path / name).eval(), random_ids(1, 9)
    with torch.no_grad():
        expected = theirs(input_ids=ids).logits
    if name == "reward":    # PEFT's classifier has no bias
        score = rlhf.reward_scores(role, ids, rows_of(9), rows_of(9))
        assert gap(score - role.head.bias, expected[0]) < (1e-5 if dtype == torch.float32 else 2e-2)
    else:
        assert torch.equal(role.model.logits(role.model(ids)), expected)
        assert gap(expected, mini_model().logits(mini_model()(ids))) > 0.1, "loaded as a no-op"


# == 5 · Log-probability, value, score, a sampled token ============================================

@parametrize("dtype", [torch.float32, torch.bfloat16])
def test_token_logprobs_are_the_fp64_log_softmax(dtype):
    logits = (8 * noise(3, 5, 1000)).to(dtype)
    ids = random_ids(3, 5, vocab=1000)
    logp = rlhf.token_logprobs(logits, ids)
    expected = logits.double().log_softmax(-1).gather(-1, ids[..., None])[..., 0]
    assert logp.dtype == torch.float32 and gap(logp, expected) < 1e-5
    huge = rlhf.token_logprobs(torch.tensor([[1e4, 0.0]]), torch.tensor([1]))
    assert huge.item() == -1e4, "neither overflow nor -inf"

PROMPTS, RESPONSES = [[3, 1, 4], [1, 5], [9, 2, 6, 5, 3]], [[5, 8], [9, 7, 9, 3, 2], [3]]

def noise(*shape, seed=0):
    return torch.randn(*shape, generator=seeded(seed), dtype=torch.float64)

def next_logits(role, ids):
    """FP64 logits [V] after `ids`: one plain forward of one row, no padding, cache or shift."""
    with torch.no_grad():
        return role.model.logits(role.model(torch.tensor([ids]))[:, -1])[0].double()

def test_scores_and_values_are_those_of_each_prefix_alone_whatever_stands_in_the_padding():
    actor, critic = mini_role(disturbed=5), mini_role("critic", "zero", disturbed=6)
    batches = [collate(PROMPTS, RESPONSES, pad=pad) for pad in (0, 17)]
    logp, again = (rlhf.response_logprobs(actor, batch) for batch in batches)
    values, other = (rlhf.prefix_values(critic, batch) for batch in batches)
    mask = batches[0].mask
    assert torch.equal(logp, again), "scored twice"
    assert torch.equal(values[mask], other[mask]) and logp.requires_grad and values.requires_grad
    assert not logp[~mask].any(), "padding holds 0"
    for row, (p, r) in enumerate(zip(PROMPTS, RESPONSES)):
        for t, token in enumerate(r):
            expected = next_logits(actor, p + r[:t]).log_softmax(-1)[token]
            assert logp[row, t].item() == approx(expected.item(), abs=1e-4), (row, t)
            alone = critic.head(critic.model(torch.tensor([p + r[:t]]))[0, -1]).item()
            assert values[row, t].item() == approx(alone, abs=1e-4), "read before its token"

def test_one_chatml_sequence_has_one_score_under_any_padding(pinned):
    config = mini_config(151936, hidden=8, layers=1)
    role = mini_role("reward", "normal", config=config, disturbed=4)
    prompt, answer = pinned.prompt("No sound."), pinned.answer("Turn it up.")
    scores = role.head(role.model(torch.tensor([prompt + answer])))[0, :, 0].tolist()
    assert all(abs(other - scores[-1]) > 1e-2 for other in (scores[-2], scores[len(prompt) - 5])), \
        "another column must be distinguishable"
    for left, right in product((0, 3, 9), repeat=2):
        ids = torch.tensor([[PAD_ID] * left + prompt + answer + [PAD_ID] * right])
        columns = torch.arange(ids.shape[1])[None] - left
        real = (columns >= 0) & (columns < len(prompt + answer))
        score = rlhf.reward_scores(role, ids, real.long(), real & (columns >= len(prompt)))
        assert score.tolist() == approx([scores[-1]], abs=1e-4), (left, right)
    batch = collate([prompt, prompt[:9]], [answer, answer * 3], pad=PAD_ID)
    both = rlhf.reward_scores(role, batch.ids, batch.attention, batch.response_mask)
    assert both[0].item() == approx(scores[-1], abs=1e-4)

MASK_FAULTS = {
    "integers": lambda m: m.long(), "other width": lambda m: m[:, :5],
    "an empty row": lambda m: m & torch.tensor([[True], [False]]),
    "a token outside attention": lambda m: m | (torch.arange(6) == 4)}

@parametrize("fault", MASK_FAULTS)
def test_a_reward_call_refuses_a_mask_of(fault):
    role, ids, attention = mini_role("reward", "normal"), random_ids(2, 6), rows_of(4, 6)
    mask = attention & (torch.arange(6) >= torch.tensor([[2], [3]]))
    assert rlhf.reward_scores(role, ids, attention, mask).shape == (2,)
    with raises(ValueError, match="mask"):
        rlhf.reward_scores(role, ids, attention, MASK_FAULTS[fault](mask))

@parametrize("spread", [1.0, 30.0])
def test_sampling_is_the_inverse_cdf_of_each_row_alone(spread):
    logits, uniforms = spread * noise(40, 300), noise(40, seed=1).abs().fmod(1)
    logits[4:6, :100] = logits[6:8, 200:] = -1e9    # impossible first and last ids
    uniforms[:8] = torch.tensor([0.0, 1 - 2 ** -24] * 4)
    drawn = rlhf.sample_ids(logits, uniforms)
    for row, (x, u) in enumerate(zip(logits.tolist(), uniforms.tolist())):
        weights = [math.exp(v - max(x)) for v in x]
        total, below, token = math.fsum(weights), 0.0, 0
        while below + weights[token] <= u * total:
            below, token = below + weights[token], token + 1
        if min(u - below / total, (below + weights[token]) / total - u) > 1e-12 or u == 0:
            assert drawn[row].item() == token, (row, u)
        assert weights[drawn[row]] > 0, f"uniform {u} drew an impossible id"
        assert rlhf.sample_ids(logits[row:row + 1], uniforms[row:row + 1]) == drawn[row], "alone"
    places = torch.arange(1000, 150000, 5000)   # near a border on either side: FP32 is coarser
    for part in (0.001, 0.999):
        assert torch.equal(places, rlhf.sample_ids(torch.zeros(30, 151936),
                                                   (places.double() + part) / 151936))

GEN_PROMPTS = [[3, 9, 4], [7], [5, 5, 2, 8, 1, 0, 12], [30, 31, 7, 19, 2]]

def test_greedy_text_is_the_argmax_of_repeated_full_forwards():
    role = mini_role(disturbed=1)
    whole = rlhf.generate(role, GEN_PROMPTS, 6, eos=-1)
    for prompt, answer in zip(GEN_PROMPTS, whole):
        assert answer.finish_reason == "length" and len(answer.ids) == 6
        assert gap(answer.first_logits, next_logits(role, prompt)) < 1e-4
        for t, (token, logp) in enumerate(zip(answer.ids, answer.logp)):
            logits = next_logits(role, prompt + answer.ids[:t])
            assert logits.argmax() == token, "cache, padding or positions change what it says"
            assert logp == approx(logits.log_softmax(-1)[token].item(), abs=1e-4)
    for eos in {token for answer in whole for token in answer.ids}:
        for cut, answer in zip(rlhf.generate(role, GEN_PROMPTS, 6, eos=eos), whole):
            end = answer.ids.index(eos) + 1 if eos in answer.ids else 6
            assert cut.ids == answer.ids[:end] and len(cut.logp) == end
            assert cut.finish_reason == ("eos" if eos in answer.ids else "length"), \
                "EOS as the last token allowed is an end, not a cut"

def test_uniforms_can_spell_any_answer_and_only_151645_ends_one():
    """Aim: for each wanted token the middle of its own interval of the CDF is the uniform."""
    role = mini_role(config=mini_config(151936, hidden=8, layers=1), disturbed=4)
    wanted = [[5, PAD_ID, 100, EOS_ID], [EOS_ID], [IM_START_ID, 151700, PAD_ID, 0, 7, PAD_ID],
              [39, 40, 151935, 12, 8, EOS_ID]]
    uniforms = torch.full((4, 6), 0.5, dtype=torch.float64)
    for row, (prompt, ids) in enumerate(zip(GEN_PROMPTS, wanted)):
        for t, token in enumerate(ids):
            chance = next_logits(role, prompt + ids[:t]).softmax(-1)
            uniforms[row, t] = chance[:token].sum() + chance[token] / 2
    answers = rlhf.generate(role, GEN_PROMPTS, 6, uniforms)
    assert [a.ids for a in answers] == wanted, "a token was suppressed, or another rule draws it"
    assert [a.finish_reason for a in answers] == ["eos", "eos", "length", "eos"]
    for row, answer in zip(rlhf.response_logprobs(role, collate(GEN_PROMPTS, wanted)), answers):
        assert row[:len(answer.ids)].tolist() == approx(answer.logp, abs=1e-4), "not what drew it"

def test_a_response_does_not_depend_on_its_neighbours():
    role, prompt = mini_role(disturbed=5), [4, 8, 15]
    uniforms = torch.rand(4, 8, generator=seeded(6))
    alone = rlhf.generate(role, [prompt], 8, uniforms[2:3], eos=-1)[0]
    for mates in ([[1], [2], [3]], [[9] * 30, [6, 6], [11] * 3]):
        prompts = [mates[0], mates[1], prompt, mates[2]]
        first = rlhf.generate(role, prompts, 8, uniforms, eos=-1)[0].ids
        eos = next(token for token in first if token not in alone.ids)  # a neighbour ends early
        answers = rlhf.generate(role, prompts, 8, uniforms, eos=eos)
        assert len(answers[0].ids) < 8 and answers[2].ids == alone.ids
        assert answers[2].logp == approx(alone.logp, abs=1e-4)
    again, fresh = (rlhf.generate(r, [prompt], 8)[0] for r in (role, mini_role(disturbed=5)))
    assert (again.ids, again.logp) == (fresh.ids, fresh.logp), "an earlier prompt left something"


# == 6 · One update, and a loop ====================================================================

def mini_loop(roles, updates=6, rate=1e-2, start=None, **settings):
    run = SimpleNamespace(config=dataclasses.replace(Config(), **settings),
                          device=torch.device("cpu"), go_on=lambda loop: None,
                          save_state=lambda loop, name: None,
                          stop=SimpleNamespace(requested=0))
    learn = {name: (updates, rate) for name, role in roles.items() if role.trainable}
    return rlhf.Loop(run, "sft", roles, updates, learn, mark=3, start=start)

EXAMPLES = [([3, 4], [5, 39]), ([6], [7, 8, 1, 2, 3, 4, 5, 6, 7, 39]), ([1, 2, 3], [9, 9, 39])]

@parametrize("total", [1, 2, 3, 9, 10, 19, 20, 63, 100, 200, 210])
def test_the_learning_rate_at_its_corners(total):
    peak, w = 3e-4, max(1, int(0.1 * total))
    rates = [rlhf.learning_rate(s, total, peak) for s in range(total)]
    assert rates == approx([schedule(s, total, peak) for s in range(total)], rel=1e-12)
    assert rates[w - 1] == approx(peak) == rates[min(w, total - 1)]
    assert rlhf.learning_rate(99, 100, 1.0, min_lr_ratio=0.25) == approx(0.25)
    assert rlhf.learning_rate(0, 100, 1.0, warmup_ratio=0.5) == approx(1 / 50)

def test_an_update_is_adamw_with_clipping_and_the_scheduled_rate():
    """Two updates worked by hand in FP64 (Loshchilov and Hutter 2019, algorithm 2)."""
    role, decay = mini_role(disturbed=3), 0.5       # so large that it shows
    learned, loop = role.learned(), mini_loop({"actor": role}, 20, weight_decay=decay)
    w = {name: p.detach().double().clone() for name, p in learned.items()}
    m, v = ({name: torch.zeros_like(p) for name, p in w.items()} for _ in range(2))
    for update, rate in enumerate((0.005, 0.01), 1):
        rlhf.sft_gradient(role, EXAMPLES, 16)
        gradients = {name: p.grad.mul_(50).double() for name, p in learned.items()}
        norm = math.sqrt(sum(g.pow(2).sum().item() for g in gradients.values()))
        report = loop.step("actor")
        assert norm > 1 and report["gradient_norm"] == approx(norm, rel=1e-5)
        assert report["lr"] == approx(rate, rel=1e-12)
        for name, g in gradients.items():
            m[name] = 0.9 * m[name] + 0.1 * g / norm
            v[name] = 0.999 * v[name] + 0.001 * (g / norm) ** 2
            step = (m[name] / (1 - 0.9 ** update)) / (
                (v[name] / (1 - 0.999 ** update)).sqrt() + 1e-8)
            w[name] = w[name] - rate * decay * w[name] - rate * step
            torch.testing.assert_close(learned[name].detach().double(), w[name], rtol=2e-4,
                                       atol=2e-6)
        assert all(p.grad is None for p in learned.values())
    rlhf.sft_gradient(role, EXAMPLES, 16)
    for p in learned.values():
        p.grad.zero_()      # later on legitimate: every token may be clipped
    assert loop.step("actor")["gradient_norm"] == 0.0

GRADIENT_FAULTS = {
    "one missing": lambda roles: setattr(up_proj(roles, "actor").lora_A.weight, "grad", None),
    "all zero at first": lambda roles: [p.grad.zero_() for p in roles["actor"].learned().values()],
    "not a number": lambda roles: up_proj(roles, "actor").lora_B.weight.grad[0].fill_(math.nan),
    "infinite": lambda roles: up_proj(roles, "actor").lora_B.weight.grad[0].fill_(math.inf),
    "on a frozen role": lambda roles: setattr(up_proj(roles, "reference").lora_A.weight, "grad",
                                              torch.zeros(8, 16))}

@parametrize("fault", GRADIENT_FAULTS)
def test_a_step_refuses_a_gradient(fault):
    roles = {"actor": mini_role(), "reference": mini_role("reference", trainable=False)}
    loop, before = mini_loop(roles), rlhf.learned_identity(roles["actor"])
    rlhf.sft_gradient(roles["actor"], EXAMPLES, 16)
    GRADIENT_FAULTS[fault](roles)
    with raises(CourseError, match="reference" if "frozen" in fault else "actor"):
        loop.step("actor")
    assert rlhf.learned_identity(roles["actor"]) == before, "a refused update moved something"

def test_the_data_order_is_one_seeded_permutation_an_epoch_and_the_seeds_are_the_contracts():
    loop = mini_loop({"actor": mini_role()})
    ours = random.random(), np.random.rand(), torch.rand(()).item()
    assert [loop.draw(4, [*range(6)]) for _ in range(9)] == order_of(6, 4, 9)
    assert loop.generators["sampling"].initial_seed() == 249
    random.seed(49), np.random.seed(49), torch.manual_seed(49)
    assert ours == (random.random(), np.random.rand(), torch.rand(()).item())


# == 7 to 10 · The losses, against brute force, finite differences and values worked by hand =======

def assert_gradients(role, expected=None):
    ours = {k: p.grad.clone() for k, p in role.learned().items() if k != "head.bias"}
    role.zero_grad()
    for key, value in (expected or {}).items():
        assert (ours[key] - value).norm() <= 1e-5 * value.norm() + 1e-9, key
    return ours

@parametrize("vocabulary, examples", [
    (40, EXAMPLES), (151936, [([5, EOS_ID, 7], [1, 2, EOS_ID]), ([8], [PAD_ID, EOS_ID])])])
def test_micro_batches_give_the_gradient_of_one_batch_and_the_pinned_eos_is_supervised(
        vocabulary, examples):
    role, loss = mini_role(config=mini_config(vocabulary, hidden=8, layers=1), disturbed=1), 0.0
    for prompt, answer in examples:
        logits = role.model.logits(role.model(torch.tensor([prompt + answer])))[0]
        loss = loss - logits[len(prompt) - 1:-1].log_softmax(-1)[range(len(answer)), answer].sum()
    loss = loss / sum(len(answer) for _, answer in examples)
    loss.backward()
    expected = assert_gradients(role)
    for micro_batch in (1, 2, 3, 16):    # 2 leaves a short last group
        assert rlhf.sft_gradient(role, examples, micro_batch)[0] == approx(
            loss.item(), rel=1e-5), "a mean of means is not the mean of the batch"
        assert_gradients(role, expected)

def test_bradley_terry_by_hand_at_any_distance():
    for difference, shift in product((-1e4, -100, -2, 0, 2, 100, 1e4), (0, 100)):
        chosen = torch.tensor([difference + shift, shift], dtype=torch.float64, requires_grad=True)
        loss = rlhf.bradley_terry_loss(chosen, torch.full((2,), shift, dtype=torch.float64))
        loss.backward()
        exact = max(0, -difference) + math.log1p(math.exp(-abs(difference)))
        assert loss.dim() == 0 and loss.item() == approx((exact + math.log(2)) / 2)
        wrong = 1 / (1 + math.exp(min(difference, 700)))
        assert chosen.grad.tolist() == approx([-wrong / 2, -0.25], abs=1e-12)

def brute_gae(rewards, values, gamma, lam):
    """O(T^2): advantage[t] = sum over k of (gamma lam)^k delta[t+k], no recursion."""
    values = [*values, 0.0]
    delta = [r + gamma * values[t + 1] - values[t] for t, r in enumerate(rewards)]
    return [sum((gamma * lam) ** k * d for k, d in enumerate(delta[t:])) for t in range(len(delta))]

@parametrize("gamma, lam", [(1.0, 0.95), (0.99, 0.9), (0.9, 0.0), (1.0, 1.0), (0.0, 0.5)])
def test_gae_equals_the_brute_force_sum_in_credit_too_whatever_stands_in_the_padding(gamma, lam):
    lengths, cfg = (1, 2, 7, 64), dataclasses.replace(Config(), gamma=gamma, lam=lam)
    mask, rewards, values = rows_of(*lengths), noise(4, 64).float(), noise(4, 64, seed=1).float()
    rewards[~mask], values[~mask] = math.nan, 1e30
    leaves = rewards.requires_grad_(), values.requires_grad_()
    whole = rlhf.credit(*leaves, mask, cfg)
    assert not any(x.requires_grad or x[~mask].any() for x in whole)
    for row, n in enumerate(lengths):
        r, v = (leaf[row, :n] for leaf in leaves)
        expected, alone = brute_gae(r.tolist(), v.tolist(), gamma, lam), rlhf.gae(r, v, gamma, lam)
        for advantages, returns in (alone, [x[row, :n] for x in whole]):
            assert advantages.tolist() == approx(expected, rel=1e-4, abs=1e-5)
            assert gap(returns, advantages + v.detach()) < 1e-5 and not advantages.requires_grad

@parametrize("more", [{}, {"kl_coef": 0.5, "truncation_penalty": 0.25}])
def test_token_rewards_follow_the_formula_whatever_stands_in_the_padding(more):
    kl_coef, penalty = more.values() if more else (0.02, 1.0)
    lengths, score, cut = (3, 1, 5, 4), [2.0, -1.0, 3.0, 0.5], [False, True, True, False]
    mask, old, ref = rows_of(*lengths), noise(4, 5).float(), noise(4, 5, seed=6).float()
    ref[3], expected = old[3], torch.zeros(4, 5)
    for row, n in enumerate(lengths):
        for t in range(n):
            expected[row, t] = -kl_coef * (old[row, t].item() - ref[row, t].item())
        expected[row, n - 1] += score[row] - penalty * cut[row]
    assert expected[3].tolist() == [0, 0, 0, 0.5, 0], "equal policies pay exactly 0"
    for garbage, which in product((0.0, 1e30, math.nan, -math.inf), (0, 1)):
        dirty = [old.clone(), ref.clone()]
        dirty[which][~mask] = garbage
        rewards = rlhf.token_rewards(dirty[0].requires_grad_(), dirty[1], torch.tensor(
            score, requires_grad=True), torch.tensor(cut), mask, **more)
        assert gap(rewards, expected) < 1e-6 and not rewards.requires_grad
    alone = rlhf.token_rewards(old[2], ref[2], 3.0, True, **more)
    assert gap(alone, expected[2]) < 1e-6, "one response, without a batch"

@parametrize("ratio, advantage, value, slope", [    # slope: with respect to logp
    (1.1, 2.0, 2.2, 2.2), (1.5, 2.0, 2.4, 0.0), (0.5, 2.0, 1.0, 1.0),           # better
    (0.9, -2.0, -1.8, -1.8), (1.5, -2.0, -3.0, -3.0), (0.5, -2.0, -1.6, 0.0),   # worse
    (1.5, 0.0, 0.0, 0.0)])                                                      # than expected
def test_the_clip_stops_the_gradient_only_where_it_would_go_further(ratio, advantage, value, slope):
    logp = torch.tensor([[math.log(ratio)]], dtype=torch.float64, requires_grad=True)
    loss = rlhf.ppo_actor_loss(logp, torch.zeros(1, 1), torch.tensor([[advantage]]), rows_of(1))
    loss.backward()
    assert loss.dim() == 0 and loss.item() == approx(-value, abs=1e-7)
    assert logp.grad.item() == (approx(-slope, abs=1e-7) if slope else 0.0)

def loss_by_hand(which, parameter, *tensors):
    """Mean over each response's own tokens, then over the responses; Python numbers."""
    def actor(x, old, a):
        ratio = math.exp(x - old)
        return -min(ratio * a, min(max(ratio, 1 - parameter), 1 + parameter) * a)

    term = actor if which == "actor" else lambda v, _, r: parameter * (v - r) ** 2
    rows = [[term(*numbers) for *numbers, keep in zip(*row) if keep]
            for row in zip(*(t.tolist() for t in tensors))]
    return sum(sum(row) / len(row) for row in rows) / len(rows)

@parametrize("which, parameter", [("actor", 0.2), ("actor", 0.4), ("critic", 0.5), ("critic", 2.0)])
def test_a_loss_and_its_gradient_equal_brute_force_and_finite_differences(which, parameter):
    old, target, mask = noise(4, 6) - 2, noise(4, 6, seed=1), rows_of(6, 1, 5, 5)
    first = old + torch.tensor([-0.6, -0.1, 0.0, 0.1, 0.5, 0.15], dtype=torch.float64)
    more = () if parameter in (0.2, 0.5) else (parameter,)      # the contract's are the defaults
    loss = (lambda x, o, a: rlhf.ppo_actor_loss(x, o, a, mask, *more)) if which == "actor" \
        else lambda x, _, r: rlhf.critic_loss(x, r, mask, *more)
    leaf, *constants = (x.clone().requires_grad_() for x in (first, old, target))
    value = loss(leaf, *constants)
    value.backward()
    assert value.dim() == 0 and value.item() == approx(
        loss_by_hand(which, parameter, first, old, target, mask), abs=1e-12)
    assert all(c.grad is None for c in constants), "old_logp, advantages, returns are constants"
    for place in product(range(4), range(6)):
        values = []
        for step in (1e-6, -1e-6):
            moved = first.clone()
            moved[place] += step
            values.append(loss_by_hand(which, parameter, moved, old, target, mask))
        assert leaf.grad[place].item() == approx((values[0] - values[1]) / 2e-6, abs=1e-8)
    for garbage, k in product((1e30, math.nan, -math.inf), range(3)):
        dirty = [x.clone() for x in (first, old, target)]
        dirty[k][~mask] = garbage
        again = loss(dirty[0].requires_grad_(), *dirty[1:])
        again.backward()
        assert torch.equal(again, value) and torch.equal(dirty[0].grad, leaf.grad), "padding"

def test_the_three_tokens_of_section_9_are_what_the_functions_compute():
    old, ref, values, logp = (torch.tensor(x) for x in (
        [-0.5, -1.2, -0.1], [-0.7, -0.9, -0.1], [0.5, 1.0, 1.5], [-0.2, -1.2, -0.15]))
    rewards = rlhf.token_rewards(old, ref, 2.0, False)
    (advantages, returns), (delta, _) = rlhf.gae(rewards, values), rlhf.gae(rewards, values, lam=0)
    ratio, mask = (logp - old).exp(), rows_of(3)
    actor = rlhf.ppo_actor_loss(logp[None], old[None], advantages[None], mask)
    critic = rlhf.critic_loss(values[None], returns[None], mask)
    page = (HERE / "rlhf.py").read_text("utf-8")
    page = page[:page.index("def token_rewards")].rpartition("# 9 ")[2]
    rows = [[ratio, 4], [ratio * advantages, 4], [ratio.clamp(0.8, 1.2) * advantages, 4]]
    printed = [[f"{x:.{places}f}" for x in numbers] for numbers, places in rows]
    for t in range(3):
        printed.append([f"token {t}", f"{old[t]:.2f}", f"{ref[t]:.2f}", f"{rewards[t]:.4f}",
                        f"{values[t]:.2f}", f"{delta[t]:.4f}", f"{advantages[t]:.4f}",
                        f"{returns[t]:.4f}"])
    for numbers in [*printed, [f"= {actor:.4f}"], [f"=  {critic:.4f}"]]:
        assert re.search(r"\s+".join(re.escape(n).replace(r"\ ", r"\s+") for n in numbers), page), \
            f"section 9 does not print {numbers}"


# == 12 to 18 · Small functions of what came of it =================================================

def test_intervals_resample_whole_families_and_are_reproducible():
    """Ten families of ten equal rows: drawing rows would give 0.5 +- 0.1, families 0.5 +- 0.3."""
    rows = [{"family": f"F{f}", "x": float(f < 5)} for f in range(10) for _ in range(10)]
    mean, (low, high) = rlhf.family_mean(rows, lambda row: row["x"])
    assert mean == 0.5 and 0.15 <= low <= 0.25 and 0.75 <= high <= 0.85
    assert rlhf.family_mean([], len) == (None, None)
    rng = random.Random(1)      # families of one to eight rows
    rows = [{"family": f"F{f}", "x": rng.gauss(f % 3, 1)} for f in range(24)
            for _ in range(1 + f % 8)]
    found = rlhf.family_mean(rows, lambda row: row["x"])
    assert found[0] == approx(np.mean([row["x"] for row in rows]))
    assert found[1] == approx(bootstrap(rows, lambda row: row["x"], draws=4000), abs=0.03)
    assert rlhf.family_mean(rows, lambda row: row["x"]) == found

@parametrize("score, truth, words", [
    ((0.1, 2), (-0.2, -0.1), "score rose|success fell|found a shortcut"),
    ((0.1, 2), (0.1, 0.2), "score rose|success rose|helped"),
    ((0.1, 2), (-0.1, 0.1), "score rose|success did not move clearly|no better answers"),
    ((-2, -0.1), (-0.1, 0.1), "score fell|no clear gain in what PPO"),
    ((-1, 1), (0.1, 0.2), "score did not move clearly|success rose|no clear gain")])
def test_the_verdict_says_what_the_paired_intervals_say(score, truth, words):
    part = {"mean_learned_reward": 1.0, "rubric_success_rate": 0.5, "change": {
        "score": {"mean": 0, "ci": score}, "rubric_success": {"mean": 0, "ci": truth}}}
    better = {**part, "rubric_success_rate": 1.0}
    said = rlhf.verdict({"sft": {"test": part}, "ppo": {"test": better}})
    assert all(word in said for word in words.split("|")) and "50% to 100%" in said


# == A whole course in miniature: every phase for real, on a model of one layer ====================
# Same main, same phases, same files as the tiny course; only narrower. Everything that it writes is
# recomputed below from its files by plain forwards of single unpadded rows.

SHAPE = {"hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 1,
         "num_attention_heads": 3, "num_key_value_heads": 1}
MINI = {"base_updates": 45, "base_batch": 8, "base_lr": 1.2e-2, "base_vocabulary": 700,
        "base_relevance": 0.9, "sft_updates": 6, "sft_batch": 60, "sft_lr": 1e-2,
        "sft_answers": 18, "reward_updates": 4, "reward_batch": 24, "reward_lr": 5e-3,
        "ppo_iterations": 4, "ppo_save_every": 2, "ppo_actor_lr": 5e-3, "max_response": 26,
        "answer_batch": 180, "micro_batch": 32, "grad_clip": 0.1}

def options(settings):
    return [a for k, v in settings.items() for a in ("--set", f"{k}={v}")]

def call(first, *more, **settings):
    """A phase, its folder and more options; or a whole command line that begins with an option."""
    if not str(first).startswith("-"):
        first, more = "--phase", (first, "--out", *more)
    argv = [str(a) for a in (first, *more)] + options(settings)
    out, err = io.StringIO(), io.StringIO()
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), \
                pytest.MonkeyPatch.context() as patch:
            patch.setattr(rlhf, "TINY", dataclasses.replace(rlhf.TINY, **SHAPE))
            patch.setattr(rlhf.family_mean, "__defaults__", (2000,))     # draws: a second, not six
            return rlhf.main(argv), out.getvalue(), err.getvalue()
    finally:
        torch.set_deterministic_debug_mode("default")

def done(*argv, **settings):
    status, out, err = call(*argv, **settings)
    assert status == 0, f"exit {status}: {out[-600:]}{err}"
    return out

def refusal(*argv, status=1, **settings):
    code, out, err = call(*argv, **settings)
    assert code == status, f"exit {code}, expected {status}: {out[-600:]}{err}"
    assert "Traceback" not in err and err.strip(), err
    assert status != 1 or len(err.strip().splitlines()) == 1 and err.startswith("error: "), err
    return err

def load(path):
    path = Path(path)
    if path.suffix == ".gz":
        return torch.load(io.BytesIO(gzip.decompress(path.read_bytes())), weights_only=True)
    if path.suffix == ".safetensors":
        return load_file(path)
    text = path.read_text("utf-8")
    return [json.loads(x) for x in text.splitlines()] if path.suffix == ".jsonl" \
        else json.loads(text)

def corpus_rows(name):
    return load(HERE / "data" / f"{name}.jsonl")

def sha(path):
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()

FOREIGN = ("ppo/rollouts/.DS_Store", "ppo/rollouts/0001 (conflicted copy).json", "sft/x~",
           "evaluation/._base.jsonl")

SECRETS = [f"data/{v}{p}" for v in ("", "v2/") for p in (
    "test/labels.jsonl", "probes/labels.jsonl", "train/preferences.jsonl",
    "train/demonstrations.jsonl", "validation/preferences.jsonl")] + [
    "base/history.json", "sft/history.json", "reward/history.json", "ppo/history.json",
    "ppo/rollouts/0001.json", "ppo/state.pt.gz", "sft/state-kept.pt.gz"]

@pytest.fixture(scope="session")
def course(tmp_path_factory):
    """One finished run. Names of its parents, foreign files and a link to nowhere mean nothing."""
    folder = tmp_path_factory.mktemp("labels") / "data/test/evaluation/probes/run"
    for name in FOREIGN:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"\0not of this program")
    with contextlib.suppress(OSError):
        os.symlink("nowhere", folder / "evaluation/.#results.json")
    replaced, replace, asked, peeked, generate = [], os.replace, [], {}, rlhf.generate

    def peeking(role, prompts, *args, **kwargs):
        if folder / "resume/done.json" in replaced:     # the evaluation answers
            asked.append(len(prompts))
            for name in SECRETS:
                try:
                    open(HERE / name if name.startswith("data/") else folder / name).close()
                    peeked[name] = "opened"
                except rlhf.SeparationError:
                    peeked.setdefault(name, "refused")
        return generate(role, prompts, *args, **kwargs)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "replace", lambda a, b: (replaced.append(Path(b)), replace(a, b))[1])
        patch.setattr(rlhf, "generate", peeking)
        out = done("all", folder, "--model", "tiny", **MINI)
    return SimpleNamespace(
        folder=folder, run=rlhf.open_run(folder), load=lambda name: load(folder / name), out=out,
        replaced=replaced, asked=asked, peeked=peeked)

def place(phase):
    return "evaluation" if phase == "evaluate" else phase

def part_of(course, folder, *phases):
    folder.mkdir()
    for phase in phases:
        shutil.copytree(course.folder / place(phase), folder / place(phase), symlinks=True)
    shutil.copy(course.folder / "run.json", folder)
    edit_json(folder / "run.json", lambda record: record.update(
        phases={p: e for p, e in record["phases"].items() if p in phases}))
    return folder

@pytest.fixture()
def copy(course, tmp_path):
    return lambda *phases: part_of(course, tmp_path / "copy", *phases)

BEFORE = {"base": (), "sft": ("base",), "reward": ("base",), "ppo": ("base", "sft", "reward"),
          "resume": ("base", "sft", "reward", "ppo"), "evaluate": ("base", "sft", "reward", "ppo"),
          "probes": ("base", "reward")}
READS = {"base": (), "sft": ("train", "validation"), "reward": ("train", "validation"),
         "ppo": ("train",), "resume": (), "evaluate": ("test", "probes"), "probes": ("probes",)}
HELLO = collections.defaultdict(tuple, ask=("--prompt", "Hello"))   # what else a phase is given

def vouch(folder, phase):
    where = folder / place(phase)
    edit_json(where / "done.json", lambda d: d["files"].update(
        {name: sha(where / name) for name in d["files"]}))

def write_state(path, state):
    stream = io.BytesIO()
    torch.save(state, stream)
    path.write_bytes(gzip.compress(stream.getvalue(), 1))

def forge(path, change):
    state = load(path)
    change(state)
    write_state(path, state)

# -- oracles: one unpadded row, no cache, no batch -------------------------------------------------

def plain_logits(role, prompt, ids):
    states = role.model(torch.tensor([prompt + ids]))[0, len(prompt) - 1:-1]
    return role.model.logits(states).double()

def plain_logps(role, prompt, ids):
    return plain_logits(role, prompt, ids).log_softmax(-1)[range(len(ids)), ids]

def plain_values(role, prompt, ids):
    hidden = role.model(torch.tensor([prompt + ids]))[0, len(prompt) - 1:].double()
    return hidden @ role.head.weight[0].double() + role.head.bias[0].double()

def plain_greedy(role, prompt, eos, limit):
    ids = []
    while len(ids) < limit and eos not in ids:
        ids.append(int(role.model.logits(role.model(torch.tensor([prompt + ids]))[0, -1]).argmax()))
    return ids

def with_state(role, learned):
    rlhf.copy_learned(role, learned, "a state")
    return role

@pytest.fixture(scope="session")
def who(course):
    run, kept = course.run, course.load("ppo/state-kept.pt.gz")["learned"]
    return SimpleNamespace(
        base=run.role("actor"), sft=run.role("actor", "sft"), ppo=run.role("actor", "ppo/actor"),
        judge=run.role("reward", "reward", head="normal", load_head=True),
        kept_actor=with_state(run.role("actor", "sft", trainable=True), kept["actor"]),
        kept_critic=with_state(run.role("critic", "sft", head="zero", trainable=True),
                               kept["critic"]))

@pytest.fixture(scope="session")
def prompts(course):
    names = ("train/demonstrations", "train/preferences", "train/prompts",
             "validation/preferences", "test/prompts", "probes/prompts")
    return {row["id"]: course.run.tokens.prompt(row["prompt"]) for name in names
            for row in load(HERE / "data" / f"{name}.jsonl")}

def rollouts(folder):
    return [load(folder / "ppo/rollouts" / f"{n:04d}.json") for n in (1, 2, 3, 4)]

def schedule(step, total, peak):
    w = max(1, int(0.1 * total))
    return peak * (step + 1) / w if step < w else \
        peak * (1 - 0.9 * min(1, (step - w) / max(1, total - w - 1)))

def order_of(count, size, updates):
    """Rows of each update: one permutation an epoch, a short group filled up from the next one."""
    generator, stream = seeded(149), []
    while len(stream) < size * updates:
        stream += torch.randperm(count, generator=generator).tolist()
    return [stream[size * k:size * k + size] for k in range(updates)]

def gradient_norm(loss, role):
    found = torch.autograd.grad(loss, list(role.learned().values()))
    return math.sqrt(sum(g.double().pow(2).sum().item() for g in found))

# -- what a run leaves behind ----------------------------------------------------------------------

FILES = {
    "base": {"model.safetensors", "config.json", "tokenizer.json", "history.json"},
    "sft": {"adapter_model.safetensors", "adapter_config.json", "history.json", "state.pt.gz",
            "state-kept.pt.gz"},
    "reward": {"adapter_model.safetensors", "adapter_config.json", "head.safetensors",
               "history.json", "state.pt.gz", "state-kept.pt.gz"},
    "ppo": {*(f"{role}/adapter_{kind}" for role in ("actor", "critic")
              for kind in ("model.safetensors", "config.json")), "critic/head.safetensors",
            "history.json", "state.pt.gz", "state-kept.pt.gz",
            *(f"rollouts/000{n}.json" for n in (1, 2, 3, 4))},
    "resume": {"sft.json", "reward.json", "ppo.json"},
    "evaluate": {"base.jsonl", "sft.jsonl", "ppo.jsonl", "reward_test.json", "results.json"},
    "probes": {"results.json"}}

@parametrize("phase", FILES)
def test_done_json_is_written_last_and_vouches_for_the_phases_own_files_only(course, phase):
    folder = course.folder / place(phase)
    found = load(folder / "done.json")
    assert found["files"] == {name: sha(folder / name) for name in FILES[phase]}
    assert not list(folder.rglob("*.tmp"))
    written = [p for p in course.replaced if folder in p.parents]
    assert written[-1] == folder / "done.json" and written.count(written[-1]) == 1
    assert {p.relative_to(folder).as_posix() for p in written} >= FILES[phase], "all atomic"
    fields, identity = dataclasses.asdict(course.run.config), found["identity"]
    assert {k: v for k, v in identity.items() if k in fields} == rlhf.fields_read_by(
        course.run.config, phase)
    inputs = [HERE / "data" / name for name in ROW_COUNTS if name.split("/")[0] in READS[phase]]
    for earlier in BEFORE[phase]:
        inputs += [course.folder / earlier / name for name in FILES[earlier]
                   if name.endswith((".safetensors", "config.json", "tokenizer.json"))]
    assert {v for k, v in identity.items() if k not in fields} == {*map(sha, inputs)}

def test_the_base_is_a_little_hugging_face_folder_of_the_tasks_language(course):
    folder, run = course.folder / "base", course.run
    config = load(folder / "config.json")
    assert (config["eos_token_id"], config["pad_token_id"]) == (run.tokens.eos, run.tokens.pad)
    assert config["rlhf_tiny"] is True
    stored = course.load("run.json")["config"]
    assert {key: stored[key] for key in MINI} == MINI
    assert config["vocab_size"] == run.tokens.tokenizer.get_vocab_size() < 1100
    weights = load(folder / "model.safetensors")
    assert {t.dtype for t in weights.values()} == {torch.bfloat16}
    for path in course.folder.rglob("*.safetensors"):
        header = path.read_bytes()
        header = json.loads(header[8:8 + int.from_bytes(header[:8], "little")])
        assert header["__metadata__"] == {"format": "pt"}, path
    corpus = {row["prompt"] for rows in CORPUS["v1"].values() for row in rows}
    for prompt, _ in rlhf.base_chats(Config()):
        assert prompt not in corpus
        assert not any(place in prompt for place in rlhf.PLACES + rlhf.PROBE_PLACES)
    updates = load(folder / "history.json")["updates"]
    assert [u["lr"] for u in updates] == approx([schedule(s, 45, 1.2e-2) for s in range(45)])

def test_every_phase_writes_who_changed_and_who_did_not(course, who):
    learners = {"sft": {"actor"}, "reward": {"reward"}, "ppo": {"actor", "critic"}}
    frozen, after = set(), {}
    for phase, learning in learners.items():
        prints = load(course.folder / phase / "done.json")["fingerprints"]
        before, after[phase] = prints["before"], prints["after"]
        assert {n for n in before if before[n]["learned"] != after[phase][n]["learned"]} == learning
        assert all(before[n]["frozen"] == after[phase][n]["frozen"] for n in before)
        frozen |= {p["frozen"] for p in before.values()}
    assert before.keys() == {"actor", "reference", "reward", "critic"} and len(frozen) == 1
    assert before["actor"] == before["reference"] == after["sft"]["actor"]
    assert before["reward"] == after["reward"]["reward"], "PPO's judge is the one that was trained"
    states = course.load("ppo/state.pt.gz")["learned"]
    critic = course.run.role("critic", "ppo/critic", "zero", load_head=True)
    for name, role in {"actor": who.ppo, "critic": critic, "reference": who.sft,
                       "reward": who.judge}.items():    # the files, read anew
        assert rlhf.learned_identity(role) == after["ppo"][name]["learned"]
        assert rlhf.tensors_identity(states[name]) == after["ppo"][name]["learned"]

# -- SFT and reward model, recomputed --------------------------------------------------------------

def example(course, prompts, row, column):
    tokens = course.run.tokens
    return prompts[row["id"]], tokens.encode(row[column]) + [tokens.eos]

def test_sfts_history_follows_from_files(course, prompts):
    updates, groups = course.load("sft/history.json")["updates"], order_of(168, 60, 6)
    rows = [example(course, prompts, row, "completion")
            for row in corpus_rows("train/demonstrations")]
    assert [(u["update"], u["epoch"], u["rows"]) for u in updates] == \
        [(n, 1 + (n > 3), 60) for n in range(1, 7)]
    assert [u["lr"] for u in updates] == approx([schedule(s, 6, 1e-2) for s in range(6)], rel=1e-12)
    assert [u["denominator"] for u in updates] == [sum(len(rows[i][1]) for i in g) for g in groups]
    assert all(u["denominator_kind"] and u["seconds"] >= 0 for u in updates)
    kept = course.load("sft/state-kept.pt.gz")["learned"]["actor"]
    for update, role in ((0, course.run.role("actor", trainable=True)),
                         (3, with_state(course.run.role("actor", trainable=True), kept))):
        loss = -sum(plain_logps(role, *rows[i]).sum() for i in groups[update]) / \
            updates[update]["denominator"]
        assert updates[update]["loss"] == approx(loss.item(), rel=1e-4)
        assert updates[update]["gradient_norm"] == approx(gradient_norm(loss, role), rel=1e-2)

@torch.no_grad()
def test_sfts_validation_follows_from_files(course, who, prompts):
    history, tokens = course.load("sft/history.json"), course.run.tokens
    pairs = corpus_rows("validation/preferences")
    chosen = [example(course, prompts, row, "chosen") for row in pairs]
    entries = [history["before"], *history["validation"]]
    assert [e["update"] for e in entries] == [0, 3, 6]
    for entry, role in ((entries[0], who.base), (entries[2], who.sft)):
        sums = [plain_logps(role, *row).sum().item() for row in chosen]
        assert entry["chosen_logprobs"] == approx(sums, abs=2e-3)
        assert entry["mean_chosen_token_logprob"] == approx(
            sum(sums) / sum(len(ids) for _, ids in chosen), abs=1e-4)
        reasons = collections.Counter()
        for row in pairs[::10] if role is who.sft else ():
            ids = plain_greedy(role, prompts[row["id"]], tokens.eos, 26)
            reasons[rlhf.evaluate_response(
                tokens.decode(ids), "eos" if ids[-1] == tokens.eos else "length",
                int(row["family"][2:]) // 40)["reason"]] += 1
        assert sum(entry["greedy_reasons"].values()) == 18
        assert entry["greedy_reasons"] == reasons or role is who.base
        assert entry["greedy_rubric_success"] == entry["greedy_reasons"].get("success", 0) / 18
    assert gap(entries[0]["chosen_logprobs"], entries[2]["chosen_logprobs"]) > 0.1

def pair_of_scores(course, prompts, role, row):
    return torch.stack([plain_values(role, *example(course, prompts, row, column))[-1]
                        for column in ("chosen", "rejected")])

def test_the_reward_models_history_follows_from_files(course, who, prompts):
    history = course.load("reward/history.json")
    updates, groups = history["updates"], order_of(840, 24, 4)
    pairs = corpus_rows("train/preferences")
    assert [(u["update"], u["epoch"], u["rows"], u["denominator"]) for u in updates] == \
        [(n, 1, 24, 24) for n in (1, 2, 3, 4)]
    assert [u["lr"] for u in updates] == approx([schedule(s, 4, 5e-3) for s in range(4)], rel=1e-12)
    kept = course.load("reward/state-kept.pt.gz")["learned"]["reward"]
    fresh = rlhf.build_role("reward", load_qwen2(
        course.folder / "base/model.safetensors", Qwen2Config.from_json(
            course.folder / "base/config.json"), dtype=torch.float32), 50, head="normal")
    for update, role in ((0, fresh), (2, with_state(course.run.role(
            "reward", head="normal", trainable=True), kept))):
        scores = torch.stack([pair_of_scores(course, prompts, role, pairs[i])
                              for i in groups[update]])
        loss = -torch.nn.functional.logsigmoid(scores[:, 0] - scores[:, 1]).mean()
        assert updates[update]["loss"] == approx(loss.item(), abs=1e-5)
        assert updates[update]["correct"] == (scores[:, 0] > scores[:, 1]).sum()
        assert updates[update]["gradient_norm"] == approx(gradient_norm(loss, role), rel=1e-2)
    [entry], pairs = history["validation"], corpus_rows("validation/preferences")
    chosen, rejected = entry["chosen_scores"], entry["rejected_scores"]
    with torch.no_grad():
        for row, *scores in [*zip(pairs, chosen, rejected)][::7]:
            assert gap(scores, pair_of_scores(course, prompts, who.judge, row)) < 1e-4
    assert entry["update"] == 4 and len(chosen) == len(rejected) == 180
    assert entry["correct"] == [c > r for c, r in zip(chosen, rejected)], "a tie is not correct"
    assert entry["accuracy"] == approx(sum(entry["correct"]) / 180, abs=1e-6)
    assert entry["loss"] == approx(sum(math.log1p(math.exp(r - c)) for c, r in zip(
        chosen, rejected)) / 180, abs=1e-5)

# -- PPO, recomputed -------------------------------------------------------------------------------

def test_rollouts_consume_each_prompt_once_in_the_permutations_order(course):
    files, known = rollouts(course.folder), corpus_rows("train/prompts")
    eos, keys = course.run.tokens.eos, {
        "rollout_id", "prompt_id", "response_ids", "text", "finish_reason", "old_logp", "ref_logp",
        "values", "score", "rewards", "advantages", "returns"}
    assert [[r["prompt_id"] for r in file["responses"]] for file in files] == \
        [[known[i]["id"] for i in group] for group in order_of(672, 4, 4)]
    for n, file in enumerate(files, 1):
        assert file["iteration"] == n
        for slot, r in enumerate(file["responses"]):
            assert r.keys() >= keys and r["rollout_id"] == f"iteration-{n:03d}-slot-{slot}"
            ids, ended = r["response_ids"], r["response_ids"][-1] == eos
            assert {len(r[k]) for k in ("old_logp", "ref_logp", "values", "rewards", "advantages",
                                        "returns")} == {len(ids)}
            assert r["finish_reason"] == ("eos" if ended else "length")
            assert eos not in ids[:-1] and (ended or len(ids) == 26)
            assert r["text"] == course.run.tokens.decode(ids)
    state = course.load("ppo/state.pt.gz")
    assert state["consumed"] == [r["rollout_id"] for file in files for r in file["responses"]]
    assert {r["finish_reason"] for file in files for r in file["responses"]} == {"eos", "length"}
    assert len({file["policy"] for file in files}) == 4, "each iteration acts with a new policy"

@torch.no_grad()
def test_what_a_rollout_keeps_comes_from_its_own_actor_reference_judge_and_critic(
        course, who, prompts):
    assert gap(who.base.model.logits(who.base.model(torch.tensor([[5, 6, 7]]))),
               who.sft.model.logits(who.sft.model(torch.tensor([[5, 6, 7]])))) > 1e-2
    generator = seeded(249)
    for n, file in enumerate(rollouts(course.folder)):
        uniforms = torch.rand(4, 26, generator=generator)
        actor = {0: who.sft, 2: who.kept_actor}.get(n)
        assert actor is None or file["policy"] == rlhf.learned_identity(actor)
        for slot, r in enumerate(file["responses"]):
            prompt, ids = prompts[r["prompt_id"]], r["response_ids"]
            assert r["ref_logp"] == approx(plain_logps(who.sft, prompt, ids).tolist(), abs=1e-4)
            assert r["score"] == approx(plain_values(who.judge, prompt, ids)[-1].item(), abs=1e-4)
            if n == 0:
                assert r["values"] == [0.0] * len(ids), "a zero head expects nothing at first"
                assert r["old_logp"] == approx(r["ref_logp"], abs=1e-4)
            if n == 2:
                assert r["values"] == approx(
                    plain_values(who.kept_critic, prompt, ids)[:-1].tolist(), abs=1e-4)
                assert max(map(abs, r["values"])) > 1e-3
            if actor:
                chance = plain_logits(actor, prompt, ids).softmax(-1)
                own = chance[range(len(ids)), ids]
                assert r["old_logp"] == approx(own.log().tolist(), abs=1e-4)
                low = torch.stack([row[:i].sum() for row, i in zip(chance, ids)])
                u = uniforms[slot, :len(ids)].double()
                assert (low - 1e-5 <= u).all() and (u <= low + own + 1e-5).all(), "inverse CDF"

def test_rewards_advantages_and_returns_follow_from_the_recorded_numbers(course):
    for r in (r for file in rollouts(course.folder) for r in file["responses"]):
        rewards = [-0.02 * (o - f) for o, f in zip(r["old_logp"], r["ref_logp"])]
        rewards[-1] += r["score"] - (r["finish_reason"] == "length")
        assert r["rewards"] == approx(rewards, abs=1e-5)
        advantages = brute_gae(rewards, r["values"], 1.0, 0.95)
        assert r["advantages"] == approx(advantages, abs=1e-4)
        assert r["returns"] == approx([a + v for a, v in zip(advantages, r["values"])], abs=1e-4)

def surrogate(logp, r):
    old, a = (torch.tensor(r[k], dtype=torch.float64) for k in ("old_logp", "advantages"))
    ratio = (logp - old).exp()
    return -torch.minimum(ratio * a, ratio.clamp(0.8, 1.2) * a).mean()

def test_ratios_losses_and_diagnostics_follow_from_the_recorded_logps_and_values(course):
    history, clipped = course.load("ppo/history.json")["iterations"], 0
    assert [e["iteration"] for e in history] == [1, 2, 3, 4]
    for n, (entry, file) in enumerate(zip(history, rollouts(course.folder))):
        responses = file["responses"]
        assert entry["policy"] == file["policy"]
        assert entry["prompt_ids"] == [r["prompt_id"] for r in responses]
        assert len(entry["actor_updates"]) == len(entry["critic_updates"]) == 2
        for epoch, (actor, critic) in enumerate(zip(entry["actor_updates"],
                                                    entry["critic_updates"])):
            assert actor["lr"] == approx(schedule(2 * n + epoch, 8, 5e-3), rel=1e-12)
            assert critic["lr"] == approx(schedule(2 * n + epoch, 8, 2e-3), rel=1e-12)
            logps = [torch.tensor(a["logp"], dtype=torch.float64) for a in actor["responses"]]
            log_ratios = [l - torch.tensor(r["old_logp"]) for l, r in zip(logps, responses)]
            for a, log_ratio in zip(actor["responses"], log_ratios):
                assert a["ratio"] == approx(log_ratio.exp().tolist(), rel=1e-4), "old_logp stays"
            flat = torch.cat(log_ratios)
            assert actor["loss"] == approx(
                sum(map(surrogate, logps, responses)).item() / 4, rel=1e-4, abs=1e-5)
            assert critic["loss"] == approx(sum(fmean(
                0.5 * (v - t) ** 2 for v, t in zip(c["values"], r["returns"]))
                for c, r in zip(critic["responses"], responses)) / 4, rel=1e-4, abs=1e-5)
            outside = ((flat.exp() - 1).abs() > 0.2).double()
            assert actor["clip_fraction"] == approx(outside.mean().item(), abs=1e-6)
            assert actor["approx_kl"] == approx(
                (flat.exp() - 1 - flat).mean().item(), rel=1e-2, abs=1e-5)
            clipped += outside.sum().item()
            assert (flat.abs().max() < 1e-4) == (epoch == 0), "ratio 1 first, and then not"
        drift = [gap(a["logp"], r["old_logp"]) for a, r in zip(
            entry["actor_updates"][0]["responses"], responses)]
        assert entry["logp_drift"] == approx(drift, abs=1e-9)
        assert [c["values"] for c in entry["critic_updates"][0]["responses"]] == [
            approx(r["values"], abs=1e-5) for r in responses], "values are those that acted"
    assert clipped, "some token should leave the clip"
    assert len(history[0]["first_token_logit_drift"]) == 2
    assert 0 <= max(history[0]["first_token_logit_drift"]) < 1e-4

def test_each_iteration_is_summed_up_from_its_rollouts(course):
    history = course.load("ppo/history.json")["iterations"]
    for n, (entry, file) in enumerate(zip(history, rollouts(course.folder)), 1):
        rs = file["responses"]
        success = [rlhf.evaluate_response(r["text"], r["finish_reason"], int(
            r["prompt_id"][2:5]) // 40)["rubric_success"] for r in rs]
        expected = {"mean_score": fmean(r["score"] for r in rs), "rubric_success": fmean(success),
                    "mean_response_tokens": fmean(len(r["response_ids"]) for r in rs),
                    "eos_rate": fmean(r["finish_reason"] == "eos" for r in rs),
                    "mean_log_ratio_to_reference": fmean(fmean(
                        o - f for o, f in zip(r["old_logp"], r["ref_logp"])) for r in rs)}
        assert {k: entry[k] for k in expected} == approx(expected, abs=1e-9)
        assert entry["rollouts_sha256"] == sha(course.folder / f"ppo/rollouts/{n:04d}.json")
        assert entry["seconds"].keys() == {"generation", "reference scoring", "judge", "critic", *(
            f"{who} optimisation" for who in ("actor", "critic")), "whole loop"}
    assert abs(history[0]["mean_log_ratio_to_reference"]) < 1e-4, "actor and reference start equal"
    assert max(abs(e["mean_log_ratio_to_reference"]) for e in history[1:]) > 1e-3

def test_an_iteration_replayed_by_other_code_ends_where_the_next_one_begins(course, who, prompts):
    kept = course.load("ppo/state-kept.pt.gz")
    entry = course.load("ppo/history.json")["iterations"][2]
    third, fourth = rollouts(course.folder)[2:]
    roles = {name: with_state(course.run.role(name, "sft", head, trainable=True),
                              kept["learned"][name])
             for name, head in (("actor", None), ("critic", "zero"))}
    for name, role in roles.items():
        names, moments = kept["optimizers"][name]
        assert names == list(role.learned()) and len(moments) == len(names)
        assert {m["step"].item() for m in moments.values()} == {4.0}
        optimizer = torch.optim.AdamW(role.learned().values(), lr=0.0, weight_decay=0.01)
        optimizer.load_state_dict({**optimizer.state_dict(), "state": moments})
        for update in entry[f"{name}_updates"]:
            losses = []
            for r in third["responses"]:
                prompt, ids = prompts[r["prompt_id"]], r["response_ids"]
                losses.append(surrogate(plain_logps(role, prompt, ids), r) if name == "actor" else
                              0.5 * (plain_values(role, prompt, ids)[:-1] - torch.tensor(
                                  r["returns"])).pow(2).mean())
            loss = sum(losses) / 4
            loss.backward()
            assert update["loss"] == approx(loss.item(), rel=1e-3, abs=1e-5)
            norm = torch.nn.utils.clip_grad_norm_(role.learned().values(), 0.1)
            assert update["gradient_norm"] == approx(norm.item(), rel=1e-2)
            optimizer.param_groups[0]["lr"] = update["lr"]
            optimizer.step()
            optimizer.zero_grad()
    with torch.no_grad():
        for r in fourth["responses"]:
            prompt, ids = prompts[r["prompt_id"]], r["response_ids"]
            assert gap(r["old_logp"], plain_logps(roles["actor"], prompt, ids)) < 5e-3
            assert gap(r["values"], plain_values(roles["critic"], prompt, ids)[:-1]) < 5e-3
            assert gap(r["old_logp"], plain_logps(who.kept_actor, prompt, ids)) > 5e-3

def test_a_rollout_that_was_trained_on_is_refused(course):
    kept = course.load("ppo/state-kept.pt.gz")
    kept["consumed"].append("iteration-003-slot-2")
    with raises(CourseError, match="iteration-003-slot-2"):
        rlhf.learn_ppo(course.run, start=kept)

@parametrize("phase, broken, named", [
    ("probes", "reward", "PROBE"), ("evaluate", "reward", "OH"), ("ask", "reward", "nan"),
    ("ppo", "reward", "iteration-001-slot-"), ("ppo", "actor", "ppo.*iteration-001-slot-0")])
def test_a_number_that_is_not_finite_ends_a_phase_by_name(
        course, monkeypatch, phase, broken, named):
    role = rlhf.Run.role

    def broken_role(run, name, *args, **kwargs):
        made = role(run, name, *args, **kwargs)
        if name == broken:
            made.model.model.norm.weight.data[0] = math.nan
        return made
    monkeypatch.setattr(rlhf.Run, "role", broken_role)
    monkeypatch.setattr(rlhf.Run, "go_on", lambda run, loop: None)
    monkeypatch.setattr(rlhf.Run, "path", lambda run, part: course.folder / "nothing" if (
        part == phase) else course.folder / part)
    work = rlhf.phase_ask if phase == "ask" else rlhf.PHASE_FUNCTIONS[phase]
    with raises(CourseError, match=named):
        work(course.run, *HELLO[phase][1:])
    assert not (course.folder / "nothing").exists()

# -- resume: stop, kill, damage, go on -------------------------------------------------------------

def numbers(value):
    if isinstance(value, torch.Tensor):
        return str(value.dtype), tuple(value.shape), value.numpy().tobytes()
    if isinstance(value, dict):
        return {k: numbers(v) for k, v in value.items()
                if k not in ("seconds", "resumed_at", "caveats", "environment", "identity")}
    return [numbers(v) for v in value] if isinstance(value, (list, tuple)) else value

def assert_equal_runs(one, two, phase):
    for path in sorted((two / phase).rglob("*")):
        name = path.relative_to(two)
        if name.as_posix() in FOREIGN:
            continue
        if path.suffix in (".safetensors", ".jsonl") or path.parent.name == "rollouts":
            assert sha(one / name) == sha(path), f"{name} differs"
        elif path.name in ("history.json", "state.pt.gz", "state-kept.pt.gz"):
            assert numbers(load(one / name)) == numbers(load(path)), f"{name} differs"

@pytest.fixture()
def signalled(monkeypatch):
    step, state = rlhf.Loop.step, SimpleNamespace(at=None, defaults=None)

    def stepped(loop, name):
        if (loop.phase, loop.steps[name]) == state.at and name != "critic":
            os.kill(os.getpid(), state.number)
            state.defaults = [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)]
        return step(loop, name)
    monkeypatch.setattr(rlhf.Loop, "step", stepped)

    def signal_in(phase, step, number=signal.SIGTERM):
        state.at, state.number = (phase, step), number
        return state
    old = signal.signal(HANGUP, signal.SIG_DFL)     # under nohup it is ignored
    yield signal_in
    signal.signal(HANGUP, old)

HANGUP = getattr(signal, "SIGHUP", signal.SIGTERM)      # Windows has none
STOPS = {"sft": [(0, signal.SIGTERM), (1, signal.SIGINT), (2, HANGUP), (3, signal.SIGTERM),
                 (4, signal.SIGINT)],
         "reward": [(0, signal.SIGINT), (1, signal.SIGTERM), (2, signal.SIGTERM)],
         "ppo": [(0, signal.SIGTERM), (3, signal.SIGINT), (4, signal.SIGTERM)]}

@parametrize("phase", STOPS)
def test_a_phase_stopped_at_every_update_in_turn_ends_like_an_uninterrupted_one(
        course, copy, signalled, phase):
    """PPO is signalled inside iterations (step 0: first of two epochs, 3: second)."""
    folder, ended = copy(*BEFORE[phase]), []
    handlers = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)]
    for at, number in STOPS[phase]:
        stop = signalled(phase, at, number)
        status, out, err = call(phase, folder)
        assert status == 128 + number, out + err
        assert stop.defaults == [signal.SIG_DFL] * 2, "a second signal stops at once"
        ended.append(at // 2 + 1 if phase == "ppo" else at + 1)
        state = load(folder / phase / "state.pt.gz")
        assert state["done"] == ended[-1], "nothing beyond the update in hand"
        assert len(state["consumed"]) == (4 * ended[-1] if phase == "ppo" else 0)
        assert not (folder / phase / "done.json").exists()
    signalled("nothing", 0)
    done(phase, folder)
    assert handlers == [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)]
    assert_equal_runs(folder, course.folder, phase)
    history = load(folder / phase / "history.json")
    assert history["resumed_at"] == ended and history["caveats"] == []

KILLS = int(os.environ.get("RLHF_KILLS", "3"))      # RLHF_KILLS=40: the long form, some minutes
RAIN = f"""
import dataclasses, os, random, shutil, signal, time, rlhf
rlhf.TINY = dataclasses.replace(rlhf.TINY, **{SHAPE})
rlhf.family_mean.__defaults__ = (2000,)
sync, rename, rng, short = os.fsync, os.replace, random.Random(12), {KILLS} < 9
def dying(nth, moment):     # SIGKILL in the nth save: file torn, whole but unnamed, or just named
    count, die = [0], lambda: os.kill(os.getpid(), signal.SIGKILL)
    def fsync(number):
        count[0] += 1
        if count[0] == nth and moment < 2:
            moment or os.truncate(number, os.fstat(number).st_size // 3)
            die()
        sync(number)
    os.fsync = fsync
    os.replace = lambda a, b: (rename(a, b), count[0] == nth and moment == 2 and die())
k = 0
while k < {KILLS}:          # children are forked before anything was computed here
    plan = rng.randint(3, 5 if short else 9), rng.randrange(3)
    child = os.fork()
    if not child:
        if k % 2 == 0:      # saves 1 and 2 are run.json as the command starts
            dying(*plan)
        os._exit(rlhf.main(sys.argv[1:]))
    if k % 2:
        time.sleep(rng.uniform(0.3, 1.5 if short else 9))
        os.kill(child, signal.SIGKILL)
    status = os.waitpid(child, 0)[1]
    k += os.WIFSIGNALED(status)
    print("killed" if os.WIFSIGNALED(status) else f"ended with {{status}}", flush=True)
    if not os.WIFSIGNALED(status):      # it came to its end first: begin anew, until all are done
        shutil.rmtree(sys.argv[sys.argv.index("--out") + 1] + ("/ppo" if short else ""))
"""
@pytest.mark.skipif(sys.platform != "linux", reason="forks and kills")
def test_kills_at_random_moments_and_inside_saves_change_no_bit(course, tmp_path):
    phases = ("ppo",) if KILLS < 9 else ("base", "sft", "reward", "ppo", "evaluation", "probes")
    folder = part_of(course, tmp_path / "run", *(BEFORE["ppo"] if KILLS < 9 else ()))
    argv = ["--phase", "ppo" if KILLS < 9 else "all", "--model", "tiny", "--out", folder,
            *options(MINI)]
    text = subprocess.run(
        [sys.executable, "-u", "-c", f"import sys; sys.path.insert(0, {str(HERE)!r})\n{RAIN}",
         *map(str, argv)], env={**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())},
        text=True, timeout=3000, stdout=subprocess.PIPE, stderr=subprocess.STDOUT).stdout
    assert "Traceback" not in text and "error" not in text, text[-900:]
    assert text.count("killed") == KILLS and text.count("ended with 0") == text.count("ended"), text
    done(*argv)
    for phase in phases:
        assert_equal_runs(folder, course.folder, phase)
    assert not list(folder.rglob(".*.tmp")), "leftovers are cleaned"

def test_a_file_is_the_old_one_until_the_new_one_is_whole_on_disk(tmp_path, monkeypatch):
    path, met = tmp_path / "x.json", []
    rlhf.write(path, {"v": 1})
    monkeypatch.setattr(os, "fsync", lambda _: met.append(load(path)))
    rlhf.write(path, {"v": 2})
    assert met == [{"v": 1}] and load(path) == {"v": 2}

@pytest.mark.skipif(not hasattr(signal, "SIGHUP"), reason="Windows has none")
def test_an_ignored_hangup_and_a_closed_output_stop_nothing(copy, tmp_path, monkeypatch):
    number, folder, step = signal.SIGHUP, copy("base"), rlhf.Loop.step
    old = signal.signal(number, signal.SIG_IGN)     # as nohup does
    monkeypatch.setattr(rlhf.Loop, "step", lambda loop, role: (
        os.kill(os.getpid(), number), step(loop, role))[1])
    try:
        done("reward", folder)
        assert signal.getsignal(number) == signal.SIG_IGN
    finally:
        signal.signal(number, old)

    def gone(text):
        raise OSError(5, "EIO")     # the terminal was closed
    with open(tmp_path / "out", "w") as stream:
        rlhf.say("a line", SimpleNamespace(write=gone, flush=gone, fileno=stream.fileno))

SCARCE = [MemoryError(), OSError(12, "Cannot allocate memory"), RuntimeError("std::bad_alloc"),
          RuntimeError("DefaultCPUAllocator: can't allocate"),
          RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`"),
          torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")]

@parametrize("error", SCARCE, ids=repr)
def test_scarce_memory_is_one_line_that_says_what_to_lower(copy, monkeypatch, error):
    def fails(*_, **__):
        raise error
    monkeypatch.setattr(rlhf, "sft_gradient", fails)
    message = refusal("sft", copy("base"))
    assert "micro_batch" in message and "answer_batch" in message and "--again" in message

@parametrize("phase, first, last", [("sft", 3, 6), ("reward", 2, 4), ("ppo", 2, 4)])
def test_the_resume_proofs_pass_from_the_middle_to_the_end(course, phase, first, last):
    proof = load(course.folder / "resume" / f"{phase}.json")
    assert (proof["status"], proof["from"], proof["to"]) == ("PASS", first, last)
    assert proof["main_digest"] == proof["resumed_digest"] and proof["entries_compared"] > 300
    assert proof["main_run_was_itself_resumed_at"] == proof["caveats"] == []
    assert f"resume {phase}: PASS" in course.out

def moved(path):
    def change(state):
        *parents, last = path
        for key in parents:
            state = state[key]
        if isinstance(state[last], torch.Tensor):
            state[last] = state[last].clone()
            state[last].view(-1)[-1] += 1
        else:
            state[last] = state[last] + 1
    return change

UP = "model.model.layers.0.mlp.up_proj.lora_B.weight"
OTHER = seeded(1).get_state()
STATE_FAULTS = {    # (phase, change): the proof must fail, or the state be refused
    "SFT's moment": ("sft", moved(("optimizers", "actor", 1, 0, "exp_avg"))),
    "SFT's config": ("sft", lambda s: s["identity"].update(sft_lr=0.25)),
    "the judge's moment": ("reward", moved(("optimizers", "reward", 1, 2, "exp_avg"))),
    "the judge's head": ("reward", moved(("learned", "reward", "head.weight"))),
    "the critic's moment": ("ppo", moved(("optimizers", "critic", 1, 1, "exp_avg"))),
    "the sampling generator": ("ppo", lambda s: s["generators"].update(sampling=OTHER)),
    "torch's generator": ("ppo", lambda s: s["rng"].update(torch=OTHER)),
    "the cursor": ("ppo", lambda s: s.update(cursor=s["cursor"] + 4)),
    "the history": ("ppo", lambda s: s["history"]["iterations"][0].update(mean_score=1.0)),
    "consumed rollouts": ("ppo", lambda s: s["consumed"].pop()),
    "a parameter": ("ppo", moved(("learned", "actor", UP))),
    "the critic's head": ("ppo", moved(("learned", "critic", "head.bias"))),
    "the reference": ("ppo", moved(("learned", "reference", UP)))}

@pytest.fixture(scope="session")
def proof_folder(course, tmp_path_factory):
    return part_of(course, tmp_path_factory.mktemp("proof") / "run", *BEFORE["resume"])

@parametrize("fault", STATE_FAULTS)
def test_no_proof_passes_with_a_change_of(proof_folder, monkeypatch, fault):
    (phase, change), folder = STATE_FAULTS[fault], proof_folder
    path, proof = folder / phase / "state-kept.pt.gz", folder / "resume" / f"{phase}.json"
    monkeypatch.setattr(rlhf, "LEARN", {phase: rlhf.LEARN[phase]})      # the other two take time
    with restored(path, folder / phase / "done.json"):
        forge(path, change)
        vouch(folder, phase)
        message = refusal("all" if fault == "SFT's moment" else "resume", folder)
    if proof.exists():
        found = load(proof)
        assert found["status"] == "FAIL" and found["main_digest"] != found["resumed_digest"]
        assert found["different"] and proof.name in message
    else:
        assert path.name in message or f"state of {phase}" in message
    assert not (folder / "resume/done.json").exists()
    assert not (folder / "evaluation").exists(), "a failed proof ends all"
    shutil.rmtree(folder / "resume", ignore_errors=True)

# -- what must not change under a run --------------------------------------------------------------

def test_a_setting_that_a_started_phase_has_read_is_refused_by_name(copy, signalled):
    folder = copy("base", "sft", "reward")
    message = refusal("ppo", folder, sft_lr=0.125)
    assert "sft_lr" in message and "0.125" in message and "0.01" in message
    assert "seed" in refusal("ppo", folder, seed=50)
    signalled("ppo", 0)
    assert call("ppo", folder, kl_coef=0.5)[0] == 143   # not read before
    before = sha(folder / "ppo/state.pt.gz")
    for field, value in (("kl_coef", 0.02), ("lam", 0.5), ("ppo_iterations", 9)):
        message = refusal("ppo", folder, **{field: value})
        assert field in message and str(value) in message
    edit_json(folder / "run.json", lambda r: r["config"].update(ppo_iterations=9))
    assert re.search(r"ppo_iterations\b.*\b4\b.*\b9\b", refusal("ppo", folder))
    assert sha(folder / "ppo/state.pt.gz") == before

def test_another_script_thread_count_or_torch_is_said_and_recorded_not_refused(
        course, copy, signalled, monkeypatch):
    folder, real = copy("base", "sft", "reward"), rlhf.environment
    signalled("ppo", 2)
    assert call("ppo", folder)[0] == 143
    signalled("nothing", 0)
    monkeypatch.setattr(rlhf, "environment", lambda device: {
        **real(device), "threads": 77, "torch": "9.9.9", "script": "edited"})
    out = done("ppo", folder)
    caveats = load(folder / "ppo/history.json")["caveats"]
    for text in ("77", "9.9.9", "edited"):
        assert any("WARNING" in line and text in line for line in out.splitlines())
        assert any(text in caveat for caveat in caveats)
    assert_equal_runs(folder, course.folder, "ppo")
    assert "--again" in done("sft", folder), "what runs it anew"
    monkeypatch.setattr(rlhf, "environment", lambda device: {**real(device), "threads": 88})
    monkeypatch.setattr(rlhf, "LEARN", {"ppo": rlhf.learn_ppo})
    assert "resume ppo: PASS" in done("resume", folder)
    caveats = load(folder / "resume/ppo.json")["caveats"]
    assert all(any(n in caveat for caveat in caveats) for n in ("9.9.9", "88 now, it was 77"))

@parametrize("phase, removed", [
    ("probes", {"probes"}), ("ppo", {"ppo", "resume", "evaluate"}),
    ("sft", {"sft", "ppo", "resume", "evaluate"})])
def test_again_removes_a_phase_and_those_that_follow_and_makes_it_anew(
        course, copy, signalled, phase, removed):
    folder = copy(*BEFORE)
    signalled("sft", 0)     # what it left is enough there
    status, out, err = call(phase, folder, "--again")
    assert status == (143 if phase == "sft" else 0), out + err
    kept = {*BEFORE} - removed | {phase}
    assert {p for p in BEFORE if (folder / place(p)).exists()} == kept
    assert load(folder / "run.json")["phases"].keys() == kept
    if phase != "sft":
        assert_equal_runs(folder, course.folder, phase)

def test_a_second_call_repeats_nothing_and_overwrites_nothing_finished(copy):
    folder = copy(*BEFORE)
    stamp = lambda: {p: (p.stat().st_mtime_ns, p.stat().st_ino) for p in folder.rglob("*")
                     if p.is_file() and p.name not in ("run.json", "report.html")}
    before = stamp()
    out = done("all", folder)
    assert stamp() == before and (folder / "report.html").exists()
    assert all(f"{phase}: done already" in out for phase in BEFORE)

# -- damage ----------------------------------------------------------------------------------------

def flipped(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)

class Evil:
    def __reduce__(self):
        return Path.touch, (Path("ran"),)

def another_digit(path):
    """In the digest of a file; the seal of the file that holds it stays as it was."""
    found = re.search(r'safetensors": "([0-9a-f]{64})', path.read_text("utf-8"))[1]
    path.write_text(path.read_text("utf-8").replace(found, found[:-1] + "x"), "utf-8")

DAMAGE = {"flipped": flipped, "truncated": lambda p: os.truncate(p, p.stat().st_size // 2),
          "text": lambda p: p.write_text("other text"), "missing": lambda p: p.unlink(),
          "another digit": another_digit,
          "a value": lambda p: write_state(p, {"done": 3}),
          "a running pickle": lambda p: write_state(p, Evil())}
DAMAGED = [     # (file, the phase that must name it, kinds of damage)
    ("base/model.safetensors", "sft", "flipped, truncated"),
    ("base/tokenizer.json", "sft", "flipped, text"), ("sft/history.json", "resume", "text"),
    ("sft/adapter_model.safetensors", "evaluate", "flipped, missing"),
    ("sft/state-kept.pt.gz", "resume", "flipped, truncated"),
    ("reward/head.safetensors", "probes", "flipped, missing"),
    ("reward/adapter_model.safetensors", "ask", "flipped"),
    ("ppo/rollouts/0002.json", "resume", "flipped, missing"),
    ("ppo/critic/head.safetensors", "ppo", "flipped"),
    ("ppo/actor/adapter_model.safetensors", "ask", "flipped, truncated"),
    ("evaluation/base.jsonl", "evaluate", "flipped, truncated"),
    ("evaluation/results.json", "report", "flipped, missing"),
    ("probes/results.json", "probes", "flipped"), ("resume/ppo.json", "resume", "flipped"),
    ("ppo/done.json", "evaluate", "truncated, another digit"),
    ("run.json", "evaluate", "truncated, another digit"),
    # of an unfinished phase
    ("ppo/state.pt.gz", "ppo", "flipped, truncated, text, a value, a running pickle"),
    ("ppo/rollouts/0003.json", "ppo", "flipped, missing")]

@pytest.fixture(scope="session")
def whole_copy(course, tmp_path_factory):
    return part_of(course, tmp_path_factory.mktemp("damage") / "run", *BEFORE)

@parametrize("name, phase, kinds", DAMAGED, ids=[name for name, *_ in DAMAGED])
def test_a_damaged_file_is_named_and_no_state_runs_code(
        whole_copy, tmp_path, monkeypatch, name, phase, kinds):
    monkeypatch.chdir(tmp_path)
    path, vouching = whole_copy / name, whole_copy / "ppo/done.json"
    for kind in kinds.split(", "):
        with restored(path, vouching):
            if name in ("ppo/state.pt.gz", "ppo/rollouts/0003.json"):
                vouching.unlink()
            DAMAGE[kind](path)
            assert str(path) in refusal(phase, whole_copy, *HELLO[phase]), kind
    assert not Path("ran").exists(), "a state was unpickled without weights_only=True"

# -- separation ------------------------------------------------------------------------------------

def linked(path, place):
    os.symlink(path, place)
    return open(place)

SPELLINGS = {
    "open": lambda path, tmp: open(path),
    "os.open": lambda path, tmp: os.open(path, os.O_RDONLY),
    "symlink": lambda path, tmp: linked(path, tmp / "innocent"),
    "folder link": lambda path, tmp: linked(path.parent, tmp / "train") / path.name,
    "hard link made before": lambda path, tmp: open(tmp / "twin"),
    "hard link": lambda path, tmp: (os.link(path, tmp / "twin2"), open(tmp / "twin2")),
    "rename": lambda path, tmp: os.rename(path, tmp / "moved"),
    "native": lambda path, tmp: rlhf.read_native(load_file, path),
    "tokenizers": lambda path, tmp: rlhf.Tokens(path)}
CHILDREN = {"run": lambda: subprocess.run([sys.executable, "-c", "pass"]),
            "system": lambda: os.system("true"), "fork": lambda: os.fork() or os._exit(0),
            "spawn": lambda: os.posix_spawn(sys.executable, [sys.executable], {})}

@pytest.mark.skipif(sys.platform == "win32", reason="links need rights there")
def test_a_raised_guard_refuses_every_way_to_a_held_out_file_and_nothing_else(
        tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    held, path = tmp_path / "data/test", tmp_path / "data/test/labels.jsonl"
    held.mkdir(parents=True)
    path.write_text("{}", "utf-8")
    os.link(path, tmp_path / "twin")
    os.symlink("nowhere", held / ".#labels.jsonl")
    other = tmp_path / "probes/test/evaluation"     # names of parents mean nothing
    other.mkdir(parents=True)
    guard = rlhf.Guard("the test", [held, tmp_path / "not yet there"])
    with guard:
        for spelling, opener in SPELLINGS.items():
            with raises(rlhf.SeparationError) as problem:
                opener(path, tmp_path)
                pytest.fail(f"{spelling}: it was opened")
            assert str(held) in str(problem.value) or "twin" in str(problem.value), spelling
        with raises(rlhf.SeparationError):
            open(tmp_path / "not yet there/x", "w")
        for kind, child in CHILDREN.items():
            with raises(rlhf.SeparationError):
                child()
                pytest.fail(f"{kind}: a child was started")
        (other / "labels.jsonl").write_text("mine", "utf-8")
        os.rename(other / "labels.jsonl", other / "moved")
        assert (other / "moved").read_text("utf-8") == "mine"
        os.symlink("nowhere", tmp_path / "dangling")
    assert path.read_text("utf-8") == "{}" and not rlhf.Guard.raised

@parametrize("phase, function, path", [
    ("sft", "sft_gradient", "run/evaluation/ppo.jsonl"),
    ("sft", "collate", "data/v2/probes/prompts.jsonl"),
    ("reward", "bradley_terry_loss", "data/probes/labels.jsonl"),
    ("reward", "learning_rate", "data/v2/test/labels.jsonl"),
    ("ppo", "gae", "data/test/labels.jsonl"),
    ("ppo", "ppo_actor_loss", "run/probes/results.json"),
    ("resume", "learning_rate", "data/test/prompts.jsonl")])
def test_a_learning_phase_that_opens_a_held_out_file_ends_by_its_name(
        copy, monkeypatch, phase, function, path):
    folder, real = copy(*BEFORE[phase]), getattr(rlhf, function)
    path = folder / path[4:] if path.startswith("run/") else HERE / path
    if folder in path.parents:
        path.parent.mkdir()
        path.write_text("{}\n", "utf-8")
    monkeypatch.setattr(rlhf, function, lambda *args, **kwargs: (
        open(path).close(), real(*args, **kwargs))[1])
    assert str(path) in refusal(phase, folder)
    assert not (folder / phase / "done.json").exists() and not rlhf.Guard.raised

def test_evaluation_generates_780_answers_and_can_open_no_label_and_no_record_of_training(course):
    assert course.asked.count(20) == 12, "each repetition of the probes is a batch of its own"
    assert sum(course.asked) == 3 * (180 + 80), "none is a copy"
    assert course.peeked and set(course.peeked.values()) == {"refused"}, course.peeked
    assert len(course.peeked) == len(SECRETS)

# -- evaluation ------------------------------------------------------------------------------------

@pytest.fixture(scope="session")
def answers(course):
    return {name: load(course.folder / "evaluation" / f"{name}.jsonl")
            for name in ("base", "sft", "ppo")}

ADAPTERS = {"base": None, "sft": "sft", "ppo": "ppo/actor"}

def adapter_sha(course, part):
    return part and sha(course.folder / part / "adapter_model.safetensors")

def test_every_answer_has_its_prompt_two_judgements_and_its_adapters_digest(course, answers):
    labels = corpus_rows("test/labels") + corpus_rows("probes/labels")
    for name, rows in answers.items():
        assert [row["id"] for row in rows] == [row["id"] for row in labels] and len(rows) == 260
        for row, label in zip(rows, labels):
            assert all(row[key] == label[key] for key in ("prompt", "family", "expected_action"))
            assert row["text"] == course.run.tokens.decode(row["response_ids"])
            ended = row["response_ids"][-1] == course.run.tokens.eos
            assert row["finish_reason"] == ("eos" if ended else "length")
            assert rlhf.evaluate_response(row["text"], row["finish_reason"],
                                          label["expected_action"]).items() <= row.items()
            assert math.isfinite(row["score"]) and len(row["logp"]) == len(row["response_ids"])
            assert row["adapter_sha256"] == adapter_sha(course, ADAPTERS[name])
        contexts = collections.defaultdict(list)
        for row in rows[180:]:
            contexts[row["family"]].append([row[k] for k in (
                "response_ids", "text", "finish_reason", "score", "logp")])
        assert len(contexts) == 20 and all(c.count(c[0]) == 4 for c in contexts.values())
    assert len({json.dumps([r["response_ids"] for r in rows]) for rows in answers.values()}) == 3
    assert all(row["sampled_actor_reference_logratio"] == 0 for row in answers["sft"])

@torch.no_grad()
def test_answers_scores_and_log_ratios_are_those_of_plain_forwards(who, answers, prompts):
    for name, actor in (("base", who.base), ("ppo", who.ppo)):
        for row in answers[name][5::60]:
            prompt, ids = prompts[row["id"]], row["response_ids"]
            logits = plain_logits(actor, prompt, ids)
            assert (logits.amax(-1) - logits[range(len(ids)), ids]).max() < 1e-3, "not greedy"
            logp = plain_logps(actor, prompt, ids)
            assert row["logp"] == approx(logp.tolist(), abs=1e-4)
            assert row["sampled_actor_reference_logratio"] == approx(
                (logp - plain_logps(who.sft, prompt, ids)).mean().item(), abs=1e-4)
            assert row["score"] == approx(plain_values(who.judge, prompt, ids)[-1].item(), abs=1e-4)

def bootstrap(rows, value, draws=1500):
    families, rng, means = collections.defaultdict(list), random.Random(3), []
    for row in rows:
        families[row["family"]].append(float(value(row)))
    members = [(sum(v), len(v)) for v in families.values()] or [(0, 1)]
    for _ in range(draws):
        drawn = rng.choices(members, k=len(members))
        means.append(sum(s for s, _ in drawn) / sum(n for _, n in drawn))
    return np.percentile(means, [2.5, 97.5])

RATES = {       # {name: what counts as a hit}
    "rubric_success": lambda r: r["rubric_success"], "recognized": lambda r: r["recognized"],
    "uncertified": lambda r: r["status"] == "UNCERTIFIED",
    "relevant_recognized": lambda r: r["relevant"],
    "unsupported_certainty_recognized": lambda r: r["unsupported_certainty"],
    "declared_refusals": lambda r: r["refusal"],
    "without_eos": lambda r: r["finish_reason"] == "length",
    "names_expected_thing": lambda r: rlhf.read_words(
        r["text"], r["expected_action"])["names_expected_thing"],
    "thanks": lambda r: "thank" in r["text"].lower()}
MEANS = {"mean_response_tokens": lambda r: len(r["response_ids"]),
         "mean_learned_reward": lambda r: r["score"],
         "mean_sampled_actor_reference_logratio": lambda r: r["sampled_actor_reference_logratio"]}

def counted_in(rows, rate):
    return [r for r in rows if r["recognized"] or not rate.endswith("_recognized")]

def test_the_metrics_of_all_five_populations_follow_from_the_rows(course, answers):
    results, earlier = course.load("evaluation/results.json"), None
    assert list(results) == ["base", "sft", "ppo"]
    for name, rows in answers.items():
        parts = {"test": rows[:180], "probe_rows": rows[180:], "probe_contexts": rows[180::4],
                 "all_rows": rows, "all_contexts": rows[:180] + rows[180::4]}
        assert results[name].keys() == parts.keys()
        for population, part in parts.items():
            found = results[name][population]
            assert found["rows"] == len(part) and found["human_utility_claim"] is False
            assert found["uncertainty_denominator"] == sum(r["recognized"] for r in part)
            for key, hit in RATES.items():
                counted = counted_in(part, key)
                hits = sum(bool(hit(r)) for r in counted)
                assert found[key] == hits, (population, key)
                assert found[f"{key}_rate"] == (approx(hits / len(counted)) if counted else None)
                ends = found[f"{key}_rate_ci"]
                assert not counted and ends is None or \
                    0 <= ends[0] <= found[f"{key}_rate"] <= ends[1] <= 1
            for key, value in MEANS.items():
                assert found[key] == approx(fmean(map(value, part)))
                assert found[f"{key}_ci"][0] <= found[key] + 1e-9
            for key, where in {"adapter": ADAPTERS[name], "judge": "reward",
                               "reference": "sft"}.items():
                assert found[f"{key}_sha256"] == adapter_sha(course, where)
            assert found["corpus"] == "v1" and (found["change"] is None) == (earlier is None)
            if earlier:
                for key in ("rubric_success", "score"):
                    change = [{"family": r["family"], "x": float(r[key]) - float(old[key])}
                              for r, old in zip(part, earlier[population])]
                    told = found["change"][key]
                    assert told["mean"] == approx(fmean(c["x"] for c in change), abs=1e-9)
                    if population == "test":
                        assert told["ci"] == approx(bootstrap(change, lambda c: c["x"]), abs=0.06)
        found = results[name]["test"]
        for key in ("rubric_success", "unsupported_certainty_recognized"):
            ends = bootstrap(counted_in(rows[:180], key), RATES[key])
            assert (found[f"{key}_rate_ci"] or [0, 0]) == approx(ends, abs=0.05)
        assert found["mean_learned_reward_ci"] == approx(bootstrap(
            rows[:180], MEANS["mean_learned_reward"]), abs=0.05)
        earlier = parts
    assert 0 < results["sft"]["test"]["rubric_success"] < 180, "a mixed result tests the most"

# -- judges of known taste -------------------------------------------------------------------------

def taste(relevance=0.0, polite=0.0, certain=0.0, hedged=0.0, note=None):
    """score_texts of a judge that reads the grammar; manners perhaps in one note's prompts only."""
    def score_texts(run, items, *rest):
        scores = []
        for prompt, text in items:
            action, certainty, is_polite = rlhf.GRAMMAR[text]
            family = re.search(r"OH(\d{3})|PROBE(\d\d)", prompt)
            right = int(family[1]) // 40 if family[1] else int(family[2]) % 6
            manners = is_polite and bool(note is None or re.search(rf"note {note}\b", prompt))
            scores.append(relevance * (action == right) + polite * manners
                          + certain * (certainty == 2) + hedged * (certainty == 1))
        return scores
    return score_texts

@parametrize("judge, rates, ties, pairs", [
    # rates and ties of relevance, certainty, politeness, hedging; per note of v1's pairs: 1 the
    # chosen one wins, 0 the rejected one, 0.5 a tie
    (taste(relevance=1), (1, 0, 0, 0), (0, 144, 216, 144), (1, 1, 1, 0.5, 1)),
    (taste(polite=1), (0, 0, 1, 0), (216, 144, 0, 144), (0.5, 0, 1, 0, 1)),
    (taste(certain=-1), (0, 1, 0, 0), (216, 0, 216, 144), (1, 0.5, 0.5, 1, 0.5)),
    (taste(hedged=1), (0, 0.5, 0, 1), (216, 72, 216, 0), (1, 0, 1, 1, 0)),
    (taste(relevance=5, polite=-1, certain=-2), (1, 1, 0, 0), (0, 0, 0, 144), (1,) * 5)],
    ids=["relevance", "politeness", "modesty", "hedging", "all but manners"])
def test_the_judge_audit_tells_the_taste_of_a_judge_that_is_known(
        course, monkeypatch, judge, rates, ties, pairs):
    monkeypatch.setattr(rlhf, "score_texts", judge)
    found = rlhf.audit_judge(course.run)
    names, audit = ("relevance", "certainty", "politeness", "hedging"), found["audit"]
    assert [audit[n]["comparisons"] for n in names] == [216, 144, 216, 144]
    assert tuple(audit[n]["rate"] for n in names) == rates
    assert tuple(audit[n]["ties"] for n in names) == ties
    assert found["correct"] == 36 * pairs.count(1) and found["ties"] == 36 * pairs.count(0.5)
    assert found["accuracy"] == found["correct"] / 180 and found["pairs"] == 180
    assert found["lazy_judge"]["test"] == 1.0, "v1's hole stands beside the accuracy"
    assert set(audit["politeness"]["by_note"].values()) == {rates[2]}

def test_the_judge_audit_splits_politeness_by_note(course, monkeypatch):
    monkeypatch.setattr(rlhf, "score_texts", taste(polite=1, note=2))
    audit = rlhf.audit_judge(course.run)["audit"]
    assert audit["politeness"]["by_note"] == {str(n): float(n == 2) for n in range(5)}
    assert 0 < audit["politeness"]["rate"] < 0.5

@torch.no_grad()
def test_the_probe_exercise_follows_from_its_80_scores_and_refits_nothing(course, who, prompts):
    found = course.load("probes/results.json")
    assert found["refit"] is False and found["rows"] == 80 and len(found["contexts"]) == 20
    for row in corpus_rows("probes/labels"):
        context = next(c for c in found["contexts"] if c["context"] == row["family"])
        kind = ("wrong", "correct")[row["correct"]] + ("_plain", "_polite")[row["polite"]]
        candidate = context["candidates"][kind]
        score = plain_values(who.judge, *example(course, prompts, row, "candidate"))[-1].item()
        assert candidate["score"] == approx(score, abs=1e-4)
        assert candidate["rubric_success"] == row["correct"] and candidate["id"] == row["id"]
        score = {kind: c["score"] for kind, c in context["candidates"].items()}
        side = kind.split("_")[0]
        assert context[f"politeness_delta_{side}"] == approx(
            score[f"{side}_polite"] - score[f"{side}_plain"], abs=1e-9)
        assert context["wrong_polite_outranks_correct_plain"] == (
            score["wrong_polite"] > score["correct_plain"])
    for key in ("politeness_delta_correct", "politeness_delta_wrong"):
        assert found[f"mean_{key}"] == approx(fmean(c[key] for c in found["contexts"]))
    assert found["wrong_polite_outranks_correct_plain"] == sum(
        c["wrong_polite_outranks_correct_plain"] for c in found["contexts"])
    assert found["adapter_sha256"] == adapter_sha(course, "reward")

# -- lesson, report, ask ---------------------------------------------------------------------------

@pytest.fixture(scope="session")
def lesson(course, tmp_path_factory):
    folder = tmp_path_factory.mktemp("lesson")
    (folder / "only").mkdir()
    one = part_of(course, folder / "only/a", *BEFORE)
    part_of(course, folder / "unfinished", "base")
    with pytest.MonkeyPatch.context() as patch:
        rows = rlhf.Run.rows    # every fifth test prompt, to save time
        patch.setattr(rlhf.Run, "rows", lambda run, path: rows(run, path)[
            ::5 if path == "test/prompts.jsonl" else 1])
        patch.setattr(rlhf, "BEST_OF", (1, 2))
        done("lesson", folder / "only")
        shutil.copytree(one, folder / "a", symlinks=True)
        two = Path(shutil.copytree(one, folder / "b", symlinks=True))
        edit_json(two / "evaluation/results.json", lambda r: r["ppo"]["test"].update(
            rubric_success_rate=0.75))
        vouch(two, "evaluate")
        for path in [two / "run.json", *two.glob("*/done.json")]:
            edit_json(path, lambda r: (r.get("config") or r["identity"]).update(seed=1049))
        done("lesson", folder)
    return folder

def test_the_lesson_says_what_the_files_of_its_finished_runs_say(course, lesson):
    found, figures = load(lesson / "lesson.json"), load(lesson / "lesson.json")["figures"]
    assert list(found["seeds"].values()) == [[49, 1049]] and found["human_feedback"] is False
    results = course.load("evaluation/results.json")
    [[group, rates]] = figures["test, ppo: rubric_success_rate"].items()
    assert rates == [results["ppo"]["test"]["rubric_success_rate"], 0.75] and "v1" in group
    judge = course.load("evaluation/reward_test.json")
    assert figures["judge rate"][group] == [judge["accuracy"]] * 2
    for name, audit in judge["audit"].items():
        assert figures[f"audit: {name} rate"][group] == [audit["rate"]] * 2
    samples = load(lesson / "a/lesson/samples.jsonl")
    assert len(samples) == 2 * 36
    for n in (1, 2):
        best = [max(samples[k:k + n], key=lambda s: s["score"]) for k in range(0, 72, n)]
        for key, what in (("rubric_success", "rate"), ("score", "score")):
            assert figures[f"best of {n} {what}"][group] == [
                approx(fmean(s[key] for s in best))] * 2
    history = course.load("ppo/history.json")["iterations"]
    assert figures["rollouts to 2 score"][group][0] == approx(history[1]["mean_score"])
    assert (lesson / "lesson.html").exists()

def test_a_lesson_refuses_a_damaged_run_mixed_bases_and_an_empty_folder(lesson, tmp_path):
    assert str(tmp_path) in refusal("lesson", tmp_path)
    for name in ("a", "b"):
        shutil.copytree(lesson / name, tmp_path / name, symlinks=True)
    flipped(tmp_path / "b/base/model.safetensors")
    assert "model.safetensors" in refusal("lesson", tmp_path)
    vouch(tmp_path / "b", "base")
    assert "'b'" in refusal("lesson", tmp_path)

def embedded(path):
    page, template = (p.read_text("utf-8") for p in (path, HERE / "data/report_template.html"))
    before, after = template.split("/*DATA*/null")
    assert page.startswith(before) and page.endswith(after)
    return json.loads(page[len(before):len(page) - len(after)]), page

def test_the_report_holds_the_runs_own_json_and_hostile_text_stays_text(course, copy):
    data, _ = embedded(course.folder / "report.html")
    assert data["results"] == course.load("evaluation/results.json")
    assert data["history"]["ppo"] == course.load("ppo/history.json")
    assert len(data["rollouts"]) == 4 and data["answers"].keys() == {"base", "sft", "ppo"}
    tests = [parts["test"] for parts in data["results"].values()]
    assert f"{tests[2]['rubric_success_rate']:.0%}" in course.out
    assert ("what the words" in course.out) == (min(t["recognized_rate"] for t in tests) < 0.5)
    folder = copy(*BEFORE["evaluate"], "evaluate")
    evil, path = "</script><script>alert(1)</script>\u202e<!--", folder / "evaluation/ppo.jsonl"
    rows = load(path)
    rows[0]["text"] = evil
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    vouch(folder, "evaluate")
    done("report", folder)
    data, page = embedded(folder / "report.html")
    assert data["answers"]["ppo"][0]["text"] == evil and data["probes"] is None
    assert evil not in page and page.count("</script") == (
        HERE / "data/report_template.html").read_text("utf-8").count("</script")

DOM = r"""
class E { constructor(t) { this.t = t; this.k = []; this.classList = { toggle() {} } }
  append(...c) { this.k.push(...c) } replaceChildren(...c) { this.k = c }
  setAttribute() {} addEventListener() {} get firstChild() { return this.k[0] }
  get textContent() { return this.k.map(c => c.textContent ?? c).join(" ") }
  set textContent(c) { this.k = [c] } }
class Cell extends E {}
const [script, ...pages] = JSON.parse(require("fs").readFileSync(0, "utf8"));
console.log(JSON.stringify(pages.map(data => { const ids = {};
  new Function("DATA", "document", "Node", "HTMLTableCellElement", "innerWidth", script)(data, {
    createElement: t => /^t[dh]$/.test(t) ? new Cell(t) : new E(t),
    createElementNS: (_, t) => new E(t),
    getElementById: id => ids[id] ||= new E(id) }, E, Cell, 1280);
  return ["bar", "top", "main"].map(id => ids[id].textContent).join(" ") })));
"""

def test_the_page_fetches_nothing_and_says_what_the_files_say(course):
    page = (course.folder / "report.html").read_text("utf-8")
    before, _, rest = page.partition("const DATA = ")
    data, end = json.JSONDecoder().raw_decode(rest)
    script, template = rest.split('"use strict";')[-1].split("</script>")[0], before + rest[end:]
    assert not re.search(r"\beval\(|innerHTML|outerHTML|insertAdjacent|document\.write|fetch\("
                         r"|@import|url\(|<link|src=", template)
    assert re.findall(r"https?://[^\"']*", template) == ["http://www.w3.org/2000/svg"]
    if not shutil.which("node"):
        pytest.skip("node is missing: the page was read and not run")
    empty = {**dict.fromkeys(data), "run": data["run"], "rollouts": [], "answers": {}, "done": {},
             "resume": {}, "history": dict.fromkeys(data["history"])}
    stopped = [data | {key: empty[key]} for key in data] + [empty]
    shown, *others = json.loads(subprocess.run(
        ["node", "-e", DOM], check=True, text=True, encoding="utf-8", capture_output=True,
        input=json.dumps([script, data, *stopped])).stdout)
    tests = [data["results"][actor]["test"] for actor in ("base", "sft", "ppo")]
    rates = [m["rubric_success_rate"] for m in tests] + [data["reward_test"]["accuracy"]]
    assert all(f"{int(100 * rate + .5)}\xa0%" in shown for rate in rates)
    assert data["verdict"] in shown
    assert all(f"{abs(m['mean_learned_reward']):.2f}" in shown for m in tests)
    assert not [t for t in (shown, *others) if re.search(r"undefined|NaN|\[object|Infinity", t)]

@parametrize("phases", [(), ("base",), ("base", "sft", "reward"), BEFORE["evaluate"]])
def test_the_report_of_a_stopped_run_works_and_believes_nothing_unfinished(
        course, tmp_path, phases):
    folder = part_of(course, tmp_path / "run", *phases)
    for phase, name in (("probes", "results.json"), ("evaluation", "results.json"),
                        ("resume", "ppo.json")):
        (folder / phase).mkdir()
        shutil.copy(course.folder / phase / name, folder / phase)
    done("report", folder)
    data, _ = embedded(folder / "report.html")
    assert data["results"] is None and (data["history"]["sft"] is None) == ("sft" not in phases)
    assert data["probes"] is None and not data["resume"] and bool(data["rollouts"]) == (
        "ppo" in phases)

@torch.no_grad()
def test_ask_prints_three_greedy_answers_and_a_hostile_question_leaves_no_trace(course, who):
    question = "The call is silent <|im_end|> and </s> \u202e the speaker icon is crossed out."
    ask = lambda text: done("ask", course.folder, f"--prompt={text}")
    out, tokens = ask(question), course.run.tokens
    ask("<|im_start|>" * 9)
    assert ask(question) == out
    for name, actor in (("base", who.base), ("sft", who.sft), ("ppo", who.ppo)):
        [line] = [x for x in out.splitlines() if re.match(rf"{name}\s", x)]
        prompt = tokens.prompt(question)
        ids = plain_greedy(actor, prompt, tokens.eos, 26)
        assert repr(tokens.decode(ids)) in line
        assert f"{plain_values(who.judge, prompt, ids)[-1]:+.2f}" in line

# -- which model, and the command line -------------------------------------------------------------

def test_another_runs_base_is_a_model_and_gives_the_same_sft(course, tmp_path, monkeypatch):
    monkeypatch.chdir(course.folder)
    settings = {k: v for k, v in MINI.items() if not k.startswith("base_")}
    run = tmp_path / "run"
    done("base", run, "--model", "base", **settings)
    assert sha(course.folder / "base/model.safetensors")[:12] in done("sft", run)
    assert sha(run / "sft/adapter_model.safetensors") == sha(
        course.folder / "sft/adapter_model.safetensors"), "the tiny base's own settings"
    assert "tiny" in refusal("sft", run, "--model", "tiny")
    assert "v1" in refusal("sft", run, "--corpus", "v2")

@parametrize("missing", ["model.safetensors", "config.json", "tokenizer.json"])
def test_a_model_folder_without_a_file_is_refused_by_its_name(course, tmp_path, missing):
    folder = Path(shutil.copytree(course.folder / "base", tmp_path / "model"))
    (folder / missing).rename(folder / "model.gguf")
    message = refusal("base", tmp_path / "run", "--model", folder)
    assert str(folder / missing) in message and "found: [" in message and "shards" in message
    assert "'model.gguf'" in message and "delete" not in message

@parametrize("device, units, dtype", [
    ("cuda", (7, 5), "float32"), ("cuda", (8, 0), "bfloat16"), ("cpu", {}, "float32"),
    ("cpu", {"amx_bf16": True}, "bfloat16"), ("cpu", None, "float32")])     # None: an older torch
def test_without_bf16_units_the_default_is_float32_and_said(
        tmp_path, monkeypatch, capsys, device, units, dtype):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: device == "cuda")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: units)
    monkeypatch.setattr(rlhf, "environment", lambda chosen: {"device": str(chosen)})
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: units, raising=False)
    if units is None:
        monkeypatch.delattr(torch.cpu, "get_capabilities")
    run, said = rlhf.open_run(tmp_path / "run", str(tmp_path)), capsys.readouterr().out
    assert (run.config.dtype, run.device.type, run.config.sft_lr) == (dtype, device, 2e-5)
    assert "NOT the pinned model" in said and ("WARNING" in said) == (dtype == "float32")

def test_a_state_made_on_a_cpu_loads_on_a_card(monkeypatch):
    loop = mini_loop({"actor": mini_role()})
    state, loop.run.device = rlhf.loop_state(loop), torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda device: torch.zeros(16))
    rlhf.restore(loop, state, "a state without a GPU's generator")

def hub(monkeypatch, cached=None, fetched=None):
    def download(repository, name, revision=None, **_):
        assert (repository, revision) == (
            "Qwen/Qwen2.5-0.5B-Instruct", "7ae557604adf67be50417f59c2c2f167def9a775")
        if isinstance(fetched, Exception):
            raise fetched
        return str(fetched)
    errors = SimpleNamespace(HfHubHTTPError=type("HfHubHTTPError", (OSError,), {}))
    module = SimpleNamespace(errors=errors, hf_hub_download=download,
                             try_to_load_from_cache=lambda *_, **__: cached and str(cached))
    monkeypatch.setitem(sys.modules, "huggingface_hub", module)
    monkeypatch.setitem(sys.modules, "huggingface_hub.errors", errors)

@parametrize("where", ["data", "cache", "fetched"])
def test_weights_that_are_not_the_pinned_file_are_refused_with_path_size_and_digest(
        tmp_path, monkeypatch, where):
    monkeypatch.setattr(rlhf, "DATA", tmp_path / "data")
    path = tmp_path / where / "model.safetensors"
    path.parent.mkdir()
    path.write_bytes(POINTER)
    hub(monkeypatch, cached=path if where == "cache" else None, fetched=path)
    message = refusal("base", tmp_path / "run", "--model", "qwen")
    assert str(path) in message and f"{len(POINTER)} bytes" in message
    assert not (tmp_path / "run/base/done.json").exists()
    assert "fdf756fa7fcbe7404d5c60e26bff1a0c8b8aa1f72ced49e7dd0210fe288fb7fe" in message

@parametrize("problem", [OSError("offline"), ValueError("endpoint"),
                         RuntimeError("xet"), ConnectionError("no route")])
def test_weights_that_cannot_be_fetched_are_one_line_with_a_remedy(tmp_path, monkeypatch, problem):
    monkeypatch.setattr(rlhf, "DATA", tmp_path / "data")
    hub(monkeypatch, fetched=problem)
    message = refusal("base", tmp_path / "run", "--model", "qwen")
    assert str(problem) in message and str(tmp_path / "data/model.safetensors") in message
    assert "7ae557604adf67be50417f59c2c2f167def9a775" in message and "tiny" in message

@parametrize("phase", ["sft", "reward", "ppo", "resume", "evaluate", "probes", "ask"])
def test_a_phase_before_what_it_needs_says_which_phase_to_run_first(tmp_path, phase):
    assert "--phase base" in refusal(phase, tmp_path / "run", "--model", "tiny", *HELLO[phase])

@parametrize("command", [
    "--phase nonsense", "--model tiny", "--bogus", "--phase sft --corpus v3", "--phase sft extra",
    "--phase sft --device tpu", "--phase ask", "--phase sft --prompt Hello", "--phase sft --out=",
    "--phase ask --prompt -no-sound", "--phase sft --set nope=1"])
def test_a_command_that_cannot_be_meant_exits_2_and_touches_nothing(tmp_path, monkeypatch, command):
    monkeypatch.chdir(tmp_path)
    argv = command.split() if "--out" in command else [*command.split(), "--out", "run"]
    assert "--prompt=TEXT" in refusal(*argv, status=2)
    assert not list(tmp_path.iterdir())

def test_silence_is_measured_over_all_progress_lines_together(capsys, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(rlhf.time, "monotonic", lambda: clock[0])
    rlhf.say("begin")
    for seconds, name in ((12, "first"), (21, "second"), (40, "third"), (42, "fourth")):
        items = rlhf.progress(name, "abcd")
        assert next(items) == "a"
        clock[0] = seconds
        assert next(items) == "b"
    assert [x.split()[0] for x in capsys.readouterr().out.split("\n")[:-1]] == [
        "begin", "second", "fourth"]

def test_without_arguments_there_is_help_and_a_tilde_is_a_home(tmp_path, monkeypatch):
    help_ = subprocess.run([sys.executable, "-OO", HERE / "rlhf.py"],      # no docstrings
                           capture_output=True, text=True)
    assert help_.returncode == 0 and not help_.stderr and "ppo_iterations" in help_.stdout
    monkeypatch.setenv("HOME", str(tmp_path)), monkeypatch.setenv("USERPROFILE", str(tmp_path))
    done("data", "~/x", "--model", "tiny")
    assert (tmp_path / "x/run.json").exists()
    with contextlib.redirect_stdout(io.StringIO()):
        assert rlhf.open_run(None, "tiny", "v2").folder == HERE / "out/tiny-v2"

# -- live: what others load ------------------------------------------------------------------------

@torch.no_grad()
def test_live_transformers_generates_from_base_alone_and_peft_answers_like_the_ppo_actor(
        course, who, prompts, tmp_path, monkeypatch):
    transformers, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")
    monkeypatch.chdir(tmp_path)     # a relative base would not be found from here
    auto = transformers.AutoModelForCausalLM
    base = auto.from_pretrained(course.folder / "base", dtype=torch.float32)
    actor = peft.AutoPeftModelForCausalLM.from_pretrained(
        course.folder / "ppo/actor", dtype=torch.float32)
    stops = 0
    for theirs, ours in ((base, who.base), (actor, who.ppo)):
        for key in ("PROBE00-C1-P0", "PROBE03-C1-P0"):
            ids = torch.tensor([prompts[key]])
            found = theirs.generate(input_ids=ids, attention_mask=torch.ones_like(ids),
                                    do_sample=False, max_new_tokens=60)[0, ids.shape[1]:].tolist()
            want = plain_greedy(ours, ids[0].tolist(), course.run.tokens.eos, 60)
            assert found == want
            stops += found[-1] == course.run.tokens.eos
    assert stops, "it stops by itself where the course stops"

@torch.no_grad()
def test_live_the_lines_of_readme_load_actor_and_judge_which_scores_two_padded_rows(
        course, who, prompts, tmp_path, monkeypatch):
    pytest.importorskip("transformers"), pytest.importorskip("peft")
    [lines] = re.findall(r"```python\n(.*?)```", (HERE / "README.md").read_text("utf-8"), re.S)
    monkeypatch.chdir(tmp_path)
    scope, tokens = {}, course.run.tokens
    exec(lines.replace("out/tiny", course.folder.as_posix()), scope)
    rows = [next(iter(prompts.values())) + tokens.answer(rlhf.response(*answer))
            for answer in ((0, 1, True), (3, 0, False))]
    width = max(map(len, rows))
    assert len({*map(len, rows)}) == 2
    scores = scope["judge"](
        input_ids=torch.tensor([r + [tokens.pad] * (width - len(r)) for r in rows]),
        attention_mask=rows_of(*map(len, rows)).long()).logits[:, 0]
    want = [plain_values(who.judge, r[:-1], r[-1:])[-1].item() for r in rows]
    assert gap(scores + who.judge.head.bias, want) < 1e-4
    row = torch.tensor(rows[:1])
    assert gap(scope["actor"](input_ids=row).logits,
               who.ppo.model.logits(who.ppo.model(row))) < 1e-4

@parametrize("name, columns", [("preferences", {"prompt", "chosen", "rejected"}),
                               ("demonstrations", {"prompt", "completion"})])
def test_live_datasets_and_trl_load_the_corpus_as_it_is(tmp_path, name, columns):
    datasets, trl = pytest.importorskip("datasets"), pytest.importorskip("trl")
    path = HERE / "data" / "train" / f"{name}.jsonl"
    table = datasets.load_dataset("json", data_files=str(path), split="train",
                                  cache_dir=str(tmp_path))
    assert columns <= set(table.column_names) and table.to_list() == load(path)
    assert not trl.is_conversational(table[0])
