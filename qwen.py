"""Qwen2, the whole forward, by hand.

From token ids to one score per vocabulary entry: an embedding, a stack of identical blocks that
each *add* something to a running vector per token (the residual stream), and a norm.

    ids [B, T]
      |  embed_tokens: a row of the table per id
      v
      x [B, T, H] ----------------.                      the residual stream
      |                           |
      |  input_layernorm          |    RMSNorm: scale to unit size, no mean, no bias
      |  q, k, v projections      |    biases on q, k and v only
      |  RoPE on q and k          |    position enters here, as a rotation, and nowhere else
      |  causal attention (GQA)   |    several query heads share one key/value head
      |  o projection             |
      v                           v
      + <-------------------------'                      x num_hidden_layers
      |---------------------------.
      |  post_attention_layernorm |
      |  down(silu(gate) * up)    |    SwiGLU: one half of the MLP gates the other
      v                           v
      + <-------------------------'
      |
      |  norm                          -> hidden [B, T, H], what forward() returns
      |  lm_head (the embedding table again where the two are tied)
      v
    logits [B, T, V]

Shape letters, here and in rlhf.py:

    B  rows of the batch                     H   width of the residual stream (hidden_size)
    T  tokens of this call                   nH  query heads          nKV  key/value heads
    S  tokens seen so far, these included    D   width of one head (H / nH)
    F  width of the MLP                      V   vocabulary

The claim that the tests check: the logits equal Hugging Face's eager Qwen2 *bit for bit*, in FP32
and in BF16: same operations, same order, same roundings, same result. So each cast below stands
where it stands for a reason. Left out: dropout, sliding windows, RoPE scaling, fused kernels;
`from_json` refuses a checkpoint that needs one of them.

    model = load_qwen2("data/model.safetensors", Qwen2Config.from_json("config.json"))
    logits = model.logits(model(ids))                                        # [B, T, V]
"""
import json
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from torch import nn

# == 1 · The configuration, named as in the checkpoint's own file ==================================

# What the file may say beyond sizes, and the one value for which this forward is right. An absent
# field means that value; any other would load without complaint and compute nonsense.
ONLY_IMPLEMENTED = {"model_type": "qwen2", "hidden_act": "silu", "use_sliding_window": False,
                    "rope_scaling": None, "rope_type": "default", "attention_dropout": 0.0,
                    "quantization_config": None}


@dataclass(frozen=True)
class Qwen2Config:
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    rms_norm_eps: float  # 1e-6 for Qwen2.5. 1e-5, the default elsewhere, is a quiet bug
    rope_theta: float  # base of the rotation's wavelengths, 1e6 for Qwen2.5
    tie_word_embeddings: bool  # True: the file holds no lm_head.weight

    @property
    def head_dim(self):
        return self.hidden_size // self.num_attention_heads

    @classmethod
    def from_json(cls, path):
        """Read a checkpoint's config.json; a ValueError names file and field if it does not fit."""
        try:
            raw = dict(json.loads(Path(path).read_text(encoding="utf-8")))
        except (ValueError, TypeError) as problem:  # not JSON, not UTF-8, no object
            raise ValueError(f"{path}: not a JSON object ({problem})") from None
        raw = {"model_type": None, **raw, **(raw.get("rope_parameters") or {})}  # newer writers
        for name, value in ONLY_IMPLEMENTED.items():
            if raw.get(name, value) != value:
                raise ValueError(f"{path}: {name} is {raw[name]!r}, only {value!r} is implemented")
        if set(raw.get("layer_types") or ["full_attention"]) != {"full_attention"}:
            raise ValueError(f"{path}: layer_types has more than 'full_attention'")
        fields = {}
        for name, kind in cls.__annotations__.items():
            value = raw.get(name)
            value = float(value) if kind is float and type(value) is int else value
            if type(value) is not kind or kind is not bool and not value > 0:
                raise ValueError(f"{path}: {name} is {value!r}, need a {kind.__name__} above 0")
            fields[name] = value
        config = cls(**fields)
        if config.hidden_size % (2 * config.num_attention_heads) \
                or config.num_attention_heads % config.num_key_value_heads \
                or (raw.get("head_dim") or config.head_dim) != config.head_dim:
            raise ValueError(f"{path}: hidden_size, num_attention_heads, num_key_value_heads and "
                             "head_dim do not divide into heads of one even width")
        return config

    def to_dict(self):
        """The content of a config.json that `from_json` and transformers both read."""
        return {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_act": "silu",
                "max_position_embeddings": 32768, "torch_dtype": "bfloat16", **asdict(self)}


# == 2 · RMSNorm: every block reads the residual stream through one of these. ======================

class RMSNorm(nn.Module):
    """y = weight * x / sqrt(mean(x^2) + eps)         (Zhang and Sennrich 2019, equation 4)"""
    def __init__(self, width, eps):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x):
        exact = x.float()  # squares of BF16 numbers lose too much
        scale = torch.rsqrt(exact.pow(2).mean(-1, keepdim=True) + self.eps)  # [..., 1]
        return self.weight * (exact * scale).to(x.dtype)  # two roundings, not one


# == 3 · RoPE: a position is an angle; attention sees only differences, so only distances ==========

def rope_frequencies(config):
    """Angle per position of each of the D/2 pairs, FP32 [D/2]: 1, then slower and slower.

    In no checkpoint: under `torch.device("meta")` they would stay without content, hence the CPU.
    Nor a buffer, which `model.to(torch.bfloat16)` would round: a fifth of a radian by position 200.
    """
    pair = torch.arange(0, config.head_dim, 2, dtype=torch.float32, device="cpu")
    return 1.0 / (config.rope_theta ** (pair / config.head_dim))


def rope_tables(frequencies, position_ids, dtype):
    """Cosine and sine of every angle, once a call for all layers: two of [B, 1, T, D]."""
    angles = position_ids[..., None].float() * frequencies.to(position_ids.device)  # [B, T, D/2]
    angles = torch.cat((angles, angles), dim=-1)[:, None]  # [B, 1, T, D], 1 for any head
    return angles.cos().to(dtype), angles.sin().to(dtype)  # in FP32, and only then rounded


def rotate(x, cos, sin):
    """Turn the pairs of x [B, n, T, D] by their angles. Qwen2 pairs dimension i with i + D/2; the
    paper's pairs are neighbours, 2i and 2i+1, and give fluent nonsense with these weights."""
    first, second = x.chunk(2, dim=-1)  # [B, n, T, D/2] each
    return x * cos + torch.cat((-second, first), dim=-1) * sin


# == 4 · The cache: keys and values of earlier tokens never change, so generation keeps them. ======

class KVCache:
    """Room for `capacity` tokens of each row; the first `length` columns are filled in all rows, so
    prompts are padded on the left and every call brings the mask of *all* columns so far."""

    def __init__(self, config, batch, capacity, dtype=torch.bfloat16, device="cpu"):
        shape = (batch, config.num_key_value_heads, capacity, config.head_dim)
        self.keys, self.values = ([torch.empty(shape, dtype=dtype, device=device)
                                   for _ in range(config.num_hidden_layers)] for _ in "kv")
        self.length = 0
        self.needs_mask = False  # True once a call brought a mask: some columns may be padding

    def check(self, x, attention_mask):
        """Refuse a call x [B, T, H] that would silently compute nonsense, before a write."""
        batch, _, capacity, _ = self.keys[0].shape
        if x.shape[0] != batch or self.length + x.shape[1] > capacity:
            raise ValueError(f"the KV cache has {batch} rows for {capacity} tokens, {self.length} "
                             f"filled: no room for {tuple(x.shape[:2])} more")
        if self.needs_mask and attention_mask is None:
            raise ValueError("the KV cache was filled under an attention mask: pass it for all "
                             "tokens so far, or padding would be attended to")

    def extend(self, layer, k, v):
        """Append k, v [B, nKV, T, D] of one layer; return all so far, [B, nKV, S, D]."""
        if k.requires_grad:
            raise ValueError("a KV cache is for generation: call the model under torch.no_grad()")
        end = self.length + k.shape[2]
        self.keys[layer][:, :, self.length : end] = k
        self.values[layer][:, :, self.length : end] = v
        return self.keys[layer][:, :, :end], self.values[layer][:, :, :end]

    def select(self, rows):
        """Keep only these rows (indices or a boolean mask): finished answers need no more work."""
        rows = torch.as_tensor(rows, device=self.keys[0].device)
        self.keys, self.values = ([x[rows] for x in kept] for kept in (self.keys, self.values))


# == 5 · Attention, MLP, block =====================================================================

def few_rows(x, weight, bias=None):
    """W x + b for the few rows x [B, in] of a decoding step. The time goes into reading W, and as
    W x^T (equal up to rounding) a CPU reads it three times as fast as for x W^T: FP32, four rows."""
    if x.dtype != torch.float32 or weight.numel() < 2**18:
        return F.linear(x, weight, bias)
    y = (weight @ x.t()).t().contiguous()  # [B, out]
    return y if bias is None else y + bias


class Linear(nn.Linear):
    """LoRA (rlhf.py) replaces these layers: they are called as modules, never read as weights."""
    def forward(self, x):
        return few_rows(x, self.weight, self.bias) if x.dim() == 2 else super().forward(x)


class NewToken:
    """One new token a row: inside the blocks x is [B, H], for attention again [B, 1, H]."""
    to_nodes, to_rows = (staticmethod(lambda x: x[:, 0]), staticmethod(lambda x: x[:, None]))


class Attention(nn.Module):
    """softmax(q k^T / sqrt(D) + mask) v, with nH query heads on nKV key/value heads (GQA)."""
    def __init__(self, config):
        super().__init__()
        H, D = config.hidden_size, config.head_dim
        nH, nKV = config.num_attention_heads, config.num_key_value_heads
        self.head_dim, self.group = D, nH // nKV
        # Biases on q, k, v and none on o. A loader that skips them gives fluent garbage.
        self.q_proj = Linear(H, nH * D, bias=True)
        self.k_proj = Linear(H, nKV * D, bias=True)
        self.v_proj = Linear(H, nKV * D, bias=True)
        self.o_proj = Linear(nH * D, H, bias=False)

    def forward(self, x, cos, sin, mask, layer, cache, tree):
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        if tree is not None:  # who looks at whom is a matter of rows
            q, k, v = tree.to_rows(q), tree.to_rows(k), tree.to_rows(v)
        B, T, _ = q.shape
        q = q.view(B, T, -1, self.head_dim).transpose(1, 2)  # [B, nH, T, D]
        k = k.view(B, T, -1, self.head_dim).transpose(1, 2)  # [B, nKV, T, D]
        v = v.view(B, T, -1, self.head_dim).transpose(1, 2)  # [B, nKV, T, D]
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)  # values carry no position
        if cache is not None:
            k, v = cache.extend(layer, k, v)  # [B, nKV, S, D], the keys already rotated

        # Each key/value head serves `group` *neighbouring* query heads: 0 0 0 1 1 1. It is repeated
        # for them (n = nH), as the reference does; or their queries are stacked for it (n = nKV).
        if cache is None and tree is None:
            k, v = k.repeat_interleave(self.group, 1), v.repeat_interleave(self.group, 1)
        n, S = k.shape[1:3]
        q = q.reshape(B, n, -1, self.head_dim)  # [B, n, nH / n * T, D]
        scores = (q @ k.transpose(2, 3)).view(B, -1, T, S) * self.head_dim**-0.5  # [B, nH, T, S]
        if mask is not None:
            scores = scores + mask
        # Exponentials and their sum in FP32: a long sum in BF16 stops growing.
        weights = scores.softmax(dim=-1, dtype=torch.float32).to(q.dtype)  # [B, nH, T, S]
        mixed = weights.view(B, n, -1, S) @ v  # [B, n, nH / n * T, D]
        mixed = mixed.view(B, -1, T, self.head_dim).transpose(1, 2).reshape(B, T, -1)
        mixed = mixed if tree is None else tree.to_nodes(mixed)
        return self.o_proj(mixed)  # [B, T, nH * D] -> [B, T, H]


class MLP(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x))            (Shazeer 2020, equation 6)"""
    def __init__(self, config):
        super().__init__()
        self.gate_proj = Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))  # [B, T, F] -> [B, T, H]


class Block(nn.Module):
    """Two additions to the residual stream, each read through its own norm."""
    def __init__(self, config):
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(self, x, *context):
        x = x + self.self_attn(self.input_layernorm(x), *context)
        return x + self.mlp(self.post_attention_layernorm(x))


# == 6 · Rows that begin alike =====================================================================
# Attention is causal, so rows agree, state by state, as long as their tokens do: prompts open with
# one system turn, both answers of a pair follow one prompt. About half of a batch's tokens are
# repeats. Each distinct beginning is computed once.

class PrefixTree:
    """The rows of a batch as a tree; a node is one distinct beginning, known by its last token.

        row 0   a b c d        node   0 1 2 3         N = 6 nodes instead of 8 tokens. Norms,
        row 1   a b e f               0 1 4 5         projections and MLP see [1, N, H], attention
                                                      sees rows [B, T, H] again

    Padding has no node; where rows need a value it gets that of node 0, and nobody may look at it.
    """

    def __init__(self, input_ids, attention_mask=None):
        real = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        nodes, node_of, place = {}, [], []  # (parent, token) -> node; of B * T places; of a node
        for ids, keep in zip(input_ids.tolist(), real.tolist()):
            node = -1
            for token, is_real in zip(ids, keep):
                if is_real:
                    node = nodes.setdefault((node, token), len(nodes))
                    if node == len(place):
                        place.append(len(node_of))
                node_of.append(node if is_real else 0)
        self.shape = tuple(input_ids.shape)
        self.node_of = torch.tensor(node_of, device=input_ids.device)  # [B * T]
        self.place = torch.tensor(place, device=input_ids.device)  # [N]

    def to_nodes(self, x):
        """[B, T, ...] -> [1, N, ...], one copy of each distinct state."""
        return x.flatten(0, 1).index_select(0, self.place)[None]

    def to_rows(self, x):
        """[1, N, C] -> [B, T, C]; in the backward pass the gradients of all copies add up."""
        return x[0].index_select(0, self.node_of).view(*self.shape, -1)


# == 7 · The model; its modules bear the checkpoint's names, so loading needs no renames ===========

class Qwen2(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.model = nn.ModuleDict({
            "embed_tokens": nn.Embedding(config.vocab_size, config.hidden_size),
            "layers": nn.ModuleList(Block(config) for _ in range(config.num_hidden_layers)),
            "norm": RMSNorm(config.hidden_size, config.rms_norm_eps),
        })
        if not config.tie_word_embeddings:
            self.lm_head = Linear(config.hidden_size, config.vocab_size, bias=False)
        self.rope_frequencies = rope_frequencies(config)

    def forward(self, input_ids, attention_mask=None, cache=None, share_prefixes=False):
        """input_ids [B, T] -> hidden states after the final norm [B, T, H].

        attention_mask  [B, S], nonzero = a real token; S counts the cached tokens too.
        share_prefixes  compute what several rows begin with once (section 6), with no filled cache;
                        equal up to rounding, and hidden states of padding are arbitrary.
        """
        x = self.model.embed_tokens(input_ids)  # [B, T, H]
        past = 0
        if cache is not None:
            cache.check(x, attention_mask)
            past = cache.length
        needed = (x.shape[0], past + x.shape[1])  # another shape would broadcast or crash far away
        if attention_mask is not None and tuple(attention_mask.shape) != needed:
            raise ValueError(f"attention_mask is {tuple(attention_mask.shape)}, need {needed}: "
                             "cached tokens count")
        if share_prefixes and past:
            raise ValueError("share_prefixes needs whole rows, but the cache holds their beginning")

        cos, sin = rope_tables(self.rope_frequencies, positions(attention_mask, past, x), x.dtype)
        mask = additive_mask(attention_mask, past, x)
        tree = PrefixTree(input_ids, attention_mask) if share_prefixes else \
            NewToken if past and x.shape[1] == 1 else None
        x = x if tree is None else tree.to_nodes(x)  # [1, N, H]
        for layer, block in enumerate(self.model.layers):
            x = block(x, cos, sin, mask, layer, cache, tree)
        x = self.model.norm(x)

        if cache is not None:
            cache.length += input_ids.shape[1]
            cache.needs_mask |= attention_mask is not None
        return x if tree is None else tree.to_rows(x)

    def logits(self, hidden, decoding=False):
        """hidden [..., H] -> [..., V]. Apart from forward() because V is large: a caller picks the
        few positions it needs first; `decoding`: one row each, [B, H]."""
        head = self.model.embed_tokens if self.config.tie_word_embeddings else self.lm_head
        return (few_rows if decoding else F.linear)(hidden, head.weight)


def positions(attention_mask, past, x):
    """Position of each new token, counting real tokens only: [B, T], or [1, T] without a mask.

    The trap: under left padding the first real token may sit in column 7, but its position is 0. An
    answer counted by columns is torn 7 positions from its prompt, and every logit of it is wrong.
    """
    if attention_mask is None:
        return torch.arange(past, past + x.shape[1], device=x.device)[None]
    return (attention_mask.bool().cumsum(-1) - 1).clamp(min=0)[:, past:]


def additive_mask(attention_mask, past, x):
    """0 where a token may look, the dtype's most negative number elsewhere: [B or 1, 1, T, S].

    Not -inf: a padding row may look nowhere; its softmax would be NaN and reach real tokens."""
    T = x.shape[1]
    if attention_mask is None and T == 1:  # one new token sees everything before it
        return None
    columns = torch.arange(past + T, device=x.device)
    visible = (columns <= columns[past:, None])[None]  # [1, T, S]: no look at the future
    if attention_mask is not None:
        visible = visible & attention_mask.bool()[:, None]  # [B, T, S]
    mask = torch.zeros(visible.shape, dtype=x.dtype, device=x.device)
    return mask.masked_fill(~visible, torch.finfo(x.dtype).min)[:, None]


# == 8 · Loading: a checkpoint that only almost fits gives a model that only almost works. =========
FLOATING = ("BF16", "F16", "F32", "F64")

def load_qwen2(path, config, dtype=torch.bfloat16, device="cpu"):
    """The frozen model, computed in `dtype`. ValueError names the file and the tensor that is
    missing, extra, misshapen or not floating point."""
    if dtype not in (torch.float32, torch.bfloat16):  # FP16 overflows under the additive mask
        raise ValueError(f"dtype is {dtype}, need torch.float32 or torch.bfloat16")
    with torch.device("meta"):  # shapes without memory; the weights come from the file
        model = Qwen2(config)
    wanted = {name: list(tensor.shape) for name, tensor in model.state_dict().items()}
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            found = {name: file.get_slice(name) for name in file.keys()}
            for name in sorted(found.keys() ^ wanted.keys()):
                raise ValueError(f"{path}: tensor {name} "
                                 f"{'is missing' if name in wanted else 'has no place here'}")
            for name, entry in found.items():
                if entry.get_shape() != wanted[name] or entry.get_dtype() not in FLOATING:
                    raise ValueError(f"{path}: tensor {name} is {entry.get_dtype()} "
                                     f"{entry.get_shape()}, need {FLOATING} {wanted[name]}")
            # copy=True: every parameter gets storage of its own, none lies in a map of the file.
            state = {name: file.get_tensor(name).to(device, dtype, copy=True) for name in wanted}
    except SafetensorError as problem:  # cut short, or another kind of file, such as a pointer
        size = 2 * sum(torch.Size(shape).numel() for shape in wanted.values())
        raise ValueError(f"{path}: not a complete safetensors file ({problem}): found "
                         f"{Path(path).stat().st_size} bytes, expected about {size} in BF16; fetch "
                         "or copy it again") from None
    model.load_state_dict(state, assign=True, strict=True)
    return model.requires_grad_(False).eval()
