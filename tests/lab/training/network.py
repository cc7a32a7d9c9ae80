"""The network that is trained: Llama, with parameters named as in Hugging Face's class."""

import math

import torch
from attrs import asdict, frozen
from torch import Tensor, nn
from torch.nn import functional


@frozen
class Shape:
    """The sizes of the network."""

    vocabulary: int = 2048
    hidden: int = 256
    layers: int = 6
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    inner: int = 704
    theta: float = 5e5
    eps: float = 1e-5

    def as_dict(self) -> dict[str, float]:
        """Return the sizes by name."""
        return asdict(self)


class Attention(nn.Module):
    """Causal self-attention with grouped key and value heads."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.head_dim = shape.head_dim
        wide, narrow = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        self.q_proj = nn.Linear(shape.hidden, wide, bias=False)
        self.k_proj = nn.Linear(shape.hidden, narrow, bias=False)
        self.v_proj = nn.Linear(shape.hidden, narrow, bias=False)
        self.o_proj = nn.Linear(wide, shape.hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Attend; ``cos`` and ``sin`` hold the rotation of each position."""
        batch, length, _ = x.shape
        q, k, v = (
            proj(x).view(batch, length, -1, self.head_dim).transpose(1, 2)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
        joined: Tensor = self.o_proj(out.transpose(1, 2).reshape(batch, length, -1))
        return joined


class Mlp(nn.Module):
    """The gated feed-forward part (SwiGLU)."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden, shape.inner, bias=False)
        self.up_proj = nn.Linear(shape.hidden, shape.inner, bias=False)
        self.down_proj = nn.Linear(shape.inner, shape.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the feed-forward part to each position."""
        out: Tensor = self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Block(nn.Module):
    """One layer: attention, then the feed-forward part, each with a residual."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.self_attn = Attention(shape)
        self.mlp = Mlp(shape)
        self.input_layernorm = nn.RMSNorm(shape.hidden, eps=shape.eps)
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden, eps=shape.eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Apply the layer."""
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Body(nn.Module):
    """Everything but the output head."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embed_tokens = nn.Embedding(shape.vocabulary, shape.hidden)
        self.layers = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.hidden, eps=shape.eps)

    def forward(self, ids: Tensor) -> Tensor:
        """Return the last hidden state of each position."""
        x = self.embed_tokens(ids)
        cos, sin = _angles(self.shape, ids.shape[1], ids.device)
        for layer in self.layers:
            x = layer(x, cos, sin)
        out: Tensor = self.norm(x)
        return out


class Network(nn.Module):
    """The whole language model, with tied embeddings."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.model = Body(shape)
        small = 0.02 / math.sqrt(2 * shape.layers)
        for path, weight in self.named_parameters():
            if weight.dim() == 2:
                inner = path.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(weight, std=small if inner else 0.02)

    def forward(self, ids: Tensor) -> Tensor:
        """Return the logits of each position."""
        return self.logits(self.model(ids))

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits of hidden states."""
        return functional.linear(hidden, self.model.embed_tokens.weight)


def _angles(shape: Shape, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
    steps = torch.arange(0, shape.head_dim, 2, device=device, dtype=torch.float32)
    inverse = shape.theta ** (-steps / shape.head_dim)
    angles = torch.outer(torch.arange(length, device=device, dtype=torch.float32), inverse)
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos(), angles.sin()


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    # Hugging Face's class rotates in the dtype of the activations: do the same.
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    left, right = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-right, left], dim=-1) * sin
