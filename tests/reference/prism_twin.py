"""PRISM in plain PyTorch: the second statement of the mathematics (SPEC sections 1, 3 to 6 and 10 to 12).

Written to be read beside SPEC.md: the scan is the token recurrence of section 1, the other lines are the
formulas they quote, gradients come from autograd. `prism grad --dtype f64` agrees with this file;
tests/fixtures/ has the numbers. It needs torch and safetensors and shares nothing with the engine but the
checkpoint directory (section 8): parameters have the names on disk. `prism export` puts it, with the chunked
scan in the recurrence's place, where transformers finds it.

    model = Prism.from_checkpoint("runs/quickstart").double()
    loss, logits = model(tokens, targets)                     # int64 [B,T]; a target of -1 is not scored

Letters: B batch, T length, D model width, H heads, K key width, V value width, L rank, F feed-forward width,
W convolution width, R solver width.
"""
import json
from dataclasses import dataclass, field, fields
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

ERASES = {"deltanet", "gdn", "prism", "prism-loop", "mom"}
LEARNED_DECAY = {"mamba2", "gdn", "prism", "prism-loop", "mom"}
MIXERS = ERASES | LEARNED_DECAY | {"linear", "retnet", "attention", "ttt-mlp", "gla"}


@dataclass
class Config:
    """config.json (SPEC section 8), with the value taken when a key is absent."""
    vocab_size: int = 32000
    hidden_size: int = 2048  # D
    num_hidden_layers: int = 21
    num_heads: int = 6  # H
    head_dim: int = 256  # K
    attention_heads: int = 0  # of attention layers; 0: num_heads
    memories: int = 4  # M, of mom, beside the shared one
    memories_active: int = 2
    expand_v: float = 2  # V / K
    intermediate_size: int | None = None  # F
    hidden_ratio: float = 4
    conv_size: int = 4  # W
    use_gate: bool = True
    norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    initializer_range: float = 0.02
    mixers: str | list[str] = "gdn"  # one name, or one a layer
    rank: int = 1  # L
    solver_dim: int = 64  # R
    solver_residual: str = "value"  # or anchor
    solver_gain: str = "sigmoid"  # or gelu
    solver_key_norm: bool = True
    solver_gate_init: float = -2.0
    solver_scale: bool = False
    ablations: list[str] = field(default_factory=list)

    @staticmethod
    def read(path: str | Path) -> "Config":
        given = json.loads(Path(path).read_text())
        return Config(**{f.name: given[f.name] for f in fields(Config) if f.name in given})

    def mixer(self, layer: int) -> str:
        return self.mixers if isinstance(self.mixers, str) else self.mixers[layer]

    @property
    def value_dim(self) -> int:  # V
        return round(self.head_dim * self.expand_v)

    @property
    def feed_forward(self) -> int:  # F
        return self.intermediate_size or -(int(self.hidden_size * self.hidden_ratio * 2 / 3) // -256) * 256


# --- sections 1 and 2: the scan -----------------------------------------------------------------------------


def scan(q: Tensor, k: Tensor, beta: Tensor | None, g: Tensor | None, writes: list[tuple[Tensor, Tensor]],
         document: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """S_t = alpha_t S_{t-1} (I - beta_t k_t k_t^T) + sum_l w_{t,l} kappa_{t,l}^T;   o_t = S_t q_t

    q, k [B,T,H,K]; beta, g = log alpha [B,T,H], None: no erasure, no decay; writes: L pairs of w_l [B,T,H,V]
    and kappa_l [B,T,H,K]; document [B,T]: the number of a token's document in its row; state S_0 [B,H,V,K].
    Returns o [B,T,H,V] and S_T. The state is 0 where a document begins, except for the row's first.
    """
    B, T, H, K = q.shape
    S = q.new_zeros(B, H, writes[0][0].shape[-1], K) if state is None else state
    outputs = []
    for t in range(T):
        if t > 0:
            opens = document[:, t] != document[:, t - 1]
            S = torch.where(opens[:, None, None, None], 0, S)
        if g is not None:
            S = g[:, t, :, None, None].exp() * S
        if beta is not None:
            k_t = k[:, t, :, None, :]  # a row, [B,H,1,K]
            S = S - beta[:, t, :, None, None] * (S @ k_t.mT) @ k_t
        for w, kappa in writes:
            S = S + w[:, t, :, :, None] * kappa[:, t, :, None, :]
        outputs.append((S @ q[:, t, :, :, None]).squeeze(-1))
    return torch.stack(outputs, 1), S


def chunked_scan(q: Tensor, k: Tensor, beta: Tensor | None, g: Tensor | None,
                 writes: list[tuple[Tensor, Tensor]], document: Tensor, state: Tensor | None = None,
                 C: int = 64) -> tuple[Tensor, Tensor]:
    """The same in chunks of C tokens (section 2), over whole tensors: what training in PyTorch can afford.

    All chunks are computed at once but for the states: S' = S J + D with a chunk's J [K,K] and D [V,K].
    Gamma, a, b, M_0 and W are section 2's. The extra writes of a chunk stand one below the other, as rows.
    """
    T, H, K = q.shape[1:]
    N = -(-T // C)

    def chunks(x: Tensor) -> Tensor:
        """[B,T,H,...] to [B,H,N,C,...]; the tail is padded with tokens that write nothing and do not decay"""
        x = F.pad(x, (0, 0) * (x.dim() - 2) + (0, N * C - T))
        return x.unflatten(1, (N, C)).movedim(3, 1)

    doc = torch.cat([document, document[:, -1:].expand(-1, N * C - T)], 1).unflatten(1, (N, C))[:, None]
    before = torch.cat([doc[:, :, :1, :1], doc[:, :, :-1, -1:]], 2)  # the document running before a chunk
    Gamma = (doc[..., :, None] == doc[..., None, :]).tril().to(q.dtype)  # [B,1,N,C,C]; with a decay [B,H,...]
    a = (doc == before).to(q.dtype)
    if g is not None:
        decay = chunks(g)
        # sum of g over j < m <= i, accumulated from j downwards, never as a difference of prefix sums
        span = decay[..., :, None].expand(*decay.shape, C).tril(-1).cumsum(-2)
        Gamma, a = Gamma * span.exp(), a * decay.cumsum(-1).exp()
    b = Gamma[..., -1, :, None]

    extra = [(chunks(w), chunks(kappa)) for w, kappa in writes if kappa is not k]
    own = [chunks(w) for w, kappa in writes if kappa is k]
    q, k = chunks(q), chunks(k)
    W = sum(own)  # what is written under k itself, the first write at least
    if extra:
        W_x, kappa_x = (torch.cat(parts, -2) for parts in zip(*extra))
    if beta is not None:
        beta = chunks(beta)[..., None]
        strict = beta * Gamma.tril(-1)
        M_0 = strict * (k @ k.mT)
        U = M_0 @ W
        if extra:
            U = U + strict.repeat(1, 1, 1, 1, len(extra)) * (k @ kappa_x.mT) @ W_x
        A_U = torch.cat([beta * a[..., None] * k, U], -1)
        A_U = torch.linalg.solve_triangular(M_0, A_U, upper=False, unitriangular=True)  # reads M_0 as I + M_0
        A, U = A_U.split([K, U.shape[-1]], -1)  # W_0 = -A S^T - U
        W = W - U
    D = (b * W).mT @ k
    if extra:
        D = D + (b.repeat(1, 1, 1, len(extra), 1) * W_x).mT @ kappa_x
    J = a[..., -1:, None] * torch.eye(K, dtype=q.dtype, device=q.device)
    if beta is not None:
        J = J - (b * A).mT @ k

    S = D.new_zeros(D[:, :, 0].shape) if state is None else state
    states = []
    for n in range(N):
        states.append(S)
        S = S @ J[:, :, n] + D[:, :, n]
    incoming = torch.stack(states, 2)
    if beta is not None:
        W = W - A @ incoming.mT
    o = a[..., None] * (q @ incoming.mT) + Gamma * (q @ k.mT) @ W
    if extra:
        o = o + Gamma.repeat(1, 1, 1, 1, len(extra)) * (q @ kappa_x.mT) @ W_x
    return o.movedim(1, 3).flatten(1, 2)[:, :T], S


# --- section 3: the pieces ----------------------------------------------------------------------------------


def wide(x: Tensor) -> Tensor:
    """At least float32: norms, gates and all that touches the state, also where matrices are bf16."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


class Weight(nn.Module):
    """`weight` (and `bias`) under a name of section 8; called, a matrix [out,in] gives x weight^T + bias."""

    def __init__(self, *shape: int, bias: int = 0):
        super().__init__()
        self.weight = nn.Parameter(torch.full(shape, torch.nan))  # until it is loaded
        self.bias = nn.Parameter(torch.full((bias,), torch.nan)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x.to(self.weight.dtype), self.weight, self.bias)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x = wide(x)
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def l2norm(x: Tensor) -> Tensor:
    x = wide(x)
    return x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()


def causal_conv(x: Tensor, weight: Tensor, document: Tensor) -> Tensor:
    """y_t = sum_{0<=j<W} weight[:,0,W-1-j] x_{t-j}, over the tokens of t's document. weight [channels,1,W]"""
    T, W = x.shape[1], weight.shape[-1]
    y = x * weight[:, 0, W - 1]
    for lag in range(1, min(W, T)):
        # Documents are numbered in order, so equal numbers mean that no border lies between.
        same = document[:, lag:] == document[:, :-lag]
        past = x[:, :-lag] * same[..., None] * weight[:, 0, W - 1 - lag]
        y = y + F.pad(past, (0, 0, lag, 0))
    return y


class FeedForward(nn.Module):
    """down(SiLU(gate(x)) * up(x))"""

    def __init__(self, c: Config):
        super().__init__()
        self.gate_proj = Weight(c.feed_forward, c.hidden_size)
        self.up_proj = Weight(c.feed_forward, c.hidden_size)
        self.down_proj = Weight(c.hidden_size, c.feed_forward)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Mixer(nn.Module):
    """What the two mixers share: the decay, and the gated, normed output."""
    scan = staticmethod(scan)  # or chunked_scan

    def __init__(self, c: Config, name: str):
        super().__init__()
        self.c, self.name = c, name
        self.D, self.H, self.K, self.V = c.hidden_size, c.num_heads, c.head_dim, c.value_dim
        self.q_proj = Weight(self.H * self.K, self.D)
        self.v_proj = Weight(self.H * self.V, self.D)
        self.g_proj = Weight(self.H * self.V, self.D) if c.use_gate else None
        self.o_proj = Weight(self.D, self.H * self.V)
        self.o_norm = Weight(self.V)
        if name in LEARNED_DECAY:
            self.a_proj = Weight(self.H, self.D)
            self.A_log = nn.Parameter(torch.empty(self.H))
            self.dt_bias = nn.Parameter(torch.empty(self.H))

    def heads(self, x: Tensor) -> Tensor:
        return wide(x).unflatten(-1, (self.H, -1))

    def decay(self, x: Tensor) -> Tensor | None:
        """g = log alpha [B,T,H]: -exp(A_log) softplus(a_proj x + dt_bias), or fixed per head, or none."""
        if self.name in LEARNED_DECAY:
            # logaddexp(y, 0) is softplus(y) without F.softplus's cut at 20
            y = wide(self.a_proj(x)) + self.dt_bias
            return -wide(self.A_log).exp() * torch.logaddexp(y, torch.zeros_like(y))
        if self.name == "retnet":
            head = torch.arange(self.H, dtype=wide(x).dtype, device=x.device)
            return torch.log1p(-2.0 ** (-5 - head)).expand(*x.shape[:2], self.H)
        return None

    def output(self, o: Tensor, x: Tensor) -> Tensor:
        """o_proj( RMSNorm_V(o) * SiLU(g_proj x) ), or without the gate"""
        o = rms_norm(o, self.o_norm.weight, self.c.norm_eps).flatten(2)
        return self.o_proj(o * F.silu(self.g_proj(x)) if self.g_proj else o)


class GatedDelta(Mixer):
    """linear, retnet, mamba2, deltanet, gdn, prism (sections 3 and 4), ttt-mlp (section 10)"""

    def __init__(self, c: Config, name: str):
        super().__init__(c, name)
        self.k_proj = Weight(self.H * self.K, self.D)
        self.b_proj = Weight(self.H, self.D)
        self.q_conv1d = Weight(self.H * self.K, 1, c.conv_size)
        self.k_conv1d = Weight(self.H * self.K, 1, c.conv_size)
        self.v_conv1d = Weight(self.H * self.V, 1, c.conv_size)
        self.solver = Solver(c) if name == "prism" and c.rank > 1 else None
        self.memory = Memory(c) if name == "ttt-mlp" else None

    def qkv(self, xn: Tensor, document: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = (self.heads(F.silu(causal_conv(proj(xn), conv.weight, document)))
                   for proj, conv in ((self.q_proj, self.q_conv1d), (self.k_proj, self.k_conv1d),
                                      (self.v_proj, self.v_conv1d)))
        return l2norm(q) * self.K**-0.5, l2norm(k), v

    def forward(self, xn: Tensor, document: Tensor) -> Tensor:
        q, k, v = self.qkv(xn, document)
        beta = wide(self.b_proj(xn)).sigmoid()
        if self.memory is not None:
            return self.output(self.memory(q * self.K**0.5, k, v, 0.1 / self.K * beta, document), xn)
        writes = [(beta[..., None] * v, k)]
        if self.solver is not None:
            writes += self.solver(xn, v, k, document)
        o, _ = self.scan(q, k, beta if self.name in ERASES else None, self.decay(xn), writes, document)
        return self.output(o, xn)


# --- section 4: the closed-form solver ----------------------------------------------------------------------


class Solver(nn.Module):
    """Writes 2..L of a token. Rows of a flattened first dimension are step-major."""

    def __init__(self, c: Config):
        super().__init__()
        D, H, K, V, R, steps = c.hidden_size, c.num_heads, c.head_dim, c.value_dim, c.solver_dim, c.rank - 1
        self.c, self.steps = c, steps
        self.conv = Weight(D, 1, c.conv_size)
        self.key_down, self.key_up = Weight(steps * R, D), Weight(steps, H * K, R)
        self.gain_down, self.gain_up = Weight(steps * R, D), Weight(steps, H * V, R)
        self.gate = Weight(steps * H, D, bias=steps * H)
        if c.solver_residual == "anchor":
            self.residual_down, self.residual_up = Weight(R, D), Weight(H * V, R)
        # only in a bypass added to a trained base
        self.scale = nn.Parameter(torch.full((steps, H), torch.nan)) if c.solver_scale else None

    def low_rank(self, u: Tensor, down: Weight, up: Weight) -> Tensor:
        """up_l down_l u for every step l, split into heads: [B,T,L-1,H,width]"""
        narrow = down(u).unflatten(-1, (self.steps, -1))
        return wide(torch.einsum("btlr,lor->btlo", narrow, up.weight)).unflatten(-1, (self.c.num_heads, -1))

    def forward(self, xn: Tensor, v: Tensor, k: Tensor, document: Tensor) -> list[tuple[Tensor, Tensor]]:
        c, off = self.c, self.c.ablations
        u = F.silu(xn if "no_anchor" in off else causal_conv(xn, self.conv.weight, document))
        kappa = self.low_rank(u, self.key_down, self.key_up)
        if c.solver_key_norm:
            kappa = l2norm(kappa)
        y = self.low_rank(u, self.gain_down, self.gain_up)
        beta = wide(self.gate(u)).sigmoid().unflatten(-1, (self.steps, c.num_heads))
        r_2 = v
        if c.solver_residual == "anchor":
            r_2 = v - self.residual_up(self.residual_down(u)).view_as(v)
        r, writes = r_2, []
        for step in range(self.steps):  # l = step + 2
            p = y[:, :, step].sigmoid()
            if c.solver_gain == "gelu":
                p = y[:, :, step] * torch.special.ndtr(y[:, :, step] * r_2)  # y Phi(y r_2)
            if "no_gain" in off:
                p = torch.full_like(v, 0.5)
            delta = p * (r_2 if "no_retain" in off else r)
            r = (1 - p) * r
            key = kappa[:, :, 0 if "shared_key" in off else step]
            if "base_key" in off or ("first_base_key" in off and step == 0):
                key = k
            gate = beta[:, :, step] if self.scale is None else beta[:, :, step] * self.scale[step]
            writes.append((gate[..., None] * delta, key))
        return writes


# --- section 5: Algorithm 1 ---------------------------------------------------------------------------------


class LoopSolver(nn.Module):
    def __init__(self, c: Config):
        super().__init__()
        D, L = c.hidden_size, c.rank
        self.conv = Weight(D, 1, c.conv_size)
        self.key = Weight(L, c.num_heads * c.head_dim, D)
        self.gain = Weight(L, c.num_heads * c.value_dim, D)
        self.gate = Weight(L * c.num_heads, D)


class PrismLoop(Mixer):
    def __init__(self, c: Config, name: str):
        super().__init__(c, name)
        self.solver = LoopSolver(c)

    def forward(self, xn: Tensor, document: Tensor) -> Tensor:
        c, solver, off = self.c, self.solver, self.c.ablations
        u = F.silu(xn if "no_anchor" in off else causal_conv(xn, solver.conv.weight, document))
        q = l2norm(self.heads(self.q_proj(u))) * self.K**-0.5
        kappa, p = (self.heads(torch.einsum("btd,lod->btlo", u.to(map.weight.dtype), map.weight))
                    for map in (solver.key, solver.gain))
        kappa = l2norm(kappa).unbind(2)
        beta = wide(solver.gate(u)).sigmoid().unflatten(-1, (c.rank, self.H))
        if "no_gain" in off:
            p = torch.full_like(p, 0.5)
        r, writes = self.heads(self.v_proj(u) - u), []
        for step in range(c.rank):
            delta = p[:, :, step] * r if "no_gelu" in off else F.gelu(p[:, :, step] * r)
            r = r - delta
            writes.append((beta[:, :, step, :, None] * delta, kappa[step]))
        o, _ = self.scan(q, kappa[0], beta[:, :, 0], self.decay(u), writes, document)
        return self.output(o, u)


# --- section 6: attention -----------------------------------------------------------------------------------


class Attention(nn.Module):
    """Causal softmax attention, rotary positions from the row's start, within documents."""

    def __init__(self, c: Config):
        super().__init__()
        self.heads = c.attention_heads or c.num_heads
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (Weight(c.hidden_size, c.hidden_size) for _ in range(4))

    @staticmethod
    def rotate(x: Tensor) -> Tensor:
        """x [B,H,T,width]: the pairs (i, i + width/2) of token t turn by t 10000^(-2i/width)."""
        T, width = x.shape[-2:]
        i, t = (torch.arange(n, dtype=x.dtype, device=x.device) for n in (width // 2, T))
        angle = t[:, None] * 10000 ** (-2 * i / width)
        left, right = x.chunk(2, -1)
        return torch.cat((left * angle.cos() - right * angle.sin(), right * angle.cos() + left * angle.sin()), -1)

    def forward(self, xn: Tensor, document: Tensor) -> Tensor:
        q, k, v = (wide(proj(xn)).unflatten(-1, (self.heads, -1)).transpose(1, 2)
                   for proj in (self.q_proj, self.k_proj, self.v_proj))
        score = self.rotate(q) @ self.rotate(k).mT * q.shape[-1]**-0.5
        seen = (document[:, :, None] == document[:, None, :]).tril()
        weight = score.masked_fill(~seen[:, None], -torch.inf).softmax(-1)
        return self.o_proj((weight @ v).transpose(1, 2).flatten(2))


# --- section 10: the serial solver, ttt-mlp -----------------------------------------------------------------


class Memory(nn.Module):
    """f(x; W) = x + LayerNorm(W2 GELU(W1 x + b1) + b2), a head each, trained by every token before it is read."""

    def __init__(self, c: Config):
        super().__init__()
        self.eps, K, M = c.norm_eps, c.head_dim, 4 * c.head_dim
        self.up, self.down, self.norm = (Weight(c.num_heads, *shape) for shape in ((M, K), (K, M), (K,)))
        for part, width in ((self.up, M), (self.down, K), (self.norm, K)):
            part.bias = nn.Parameter(torch.empty(c.num_heads, width))

    def answer(self, x: Tensor, up: Tensor, up_bias: Tensor, down: Tensor, down_bias: Tensor) -> Tensor:
        hidden = F.gelu((up @ x[..., None]).squeeze(-1) + up_bias)
        z = (down @ hidden[..., None]).squeeze(-1) + down_bias
        zhat = F.layer_norm(z, z.shape[-1:], eps=self.eps)
        return x + self.norm.weight * zhat + self.norm.bias

    def forward(self, q: Tensor, k: Tensor, v: Tensor, eta: Tensor, document: Tensor) -> Tensor:
        """q, k, v [B,T,H,K]; eta [B,T,H]. The outer gradient goes through the inner one: create_graph."""
        B, T = eta.shape[:2]
        with torch.enable_grad():
            initial = [wide(w).expand(B, *w.shape)
                       for w in (self.up.weight, self.up.bias, self.down.weight, self.down.bias)]
            weights, outputs = initial, []
            for t in range(T):
                if t > 0:
                    opens = document[:, t] != document[:, t - 1]
                    weights = [torch.where(opens.view(B, *[1] * (w.dim() - 1)), w0, w)
                               for w0, w in zip(initial, weights)]
                loss = (self.answer(k[:, t], *weights) - v[:, t]).square().sum() / 2
                slopes = torch.autograd.grad(loss, weights, create_graph=True)
                weights = [w - eta[:, t].view(*eta[:, t].shape, *[1] * (w.dim() - 2)) * s
                           for w, s in zip(weights, slopes)]
                outputs.append(self.answer(q[:, t], *weights))
        return torch.stack(outputs, 1)


# --- section 11: mixture of memories ------------------------------------------------------------------------


class MixtureOfMemories(GatedDelta):
    """M + 1 memories: the first takes every token, the others those that choose them, as if there were no more."""

    def __init__(self, c: Config, name: str):
        super().__init__(c, name)
        gates = (c.memories + 1) * self.H  # memory-major
        self.a_proj, self.b_proj = Weight(gates, self.D), Weight(gates, self.D)
        self.A_log, self.dt_bias = nn.Parameter(torch.empty(gates)), nn.Parameter(torch.empty(gates))
        self.router = Weight(c.memories, self.D)

    def forward(self, xn: Tensor, document: Tensor) -> Tensor:
        q, k, v = self.qkv(xn, document)
        beta, g = (x.unflatten(-1, (-1, self.H)) for x in (wide(self.b_proj(xn)).sigmoid(), self.decay(xn)))
        # A stable sort: of equal scores the lower index.
        score, memory = wide(self.router(xn)).softmax(-1).sort(dim=-1, descending=True, stable=True)
        score, memory = (x[..., :self.c.memories_active] for x in (score, memory))
        share = score / score.sum(-1, keepdim=True)
        o = []
        for b in range(len(xn)):
            mixed = torch.zeros_like(v[b])
            for m in range(self.c.memories + 1):
                slot = memory[b] == m - 1
                t = torch.arange(len(v[b]), device=xn.device) if m == 0 else slot.any(-1).nonzero().squeeze(-1)
                if len(t) == 0:
                    continue
                key, gate = k[b, t][None], beta[b, t, m][None]
                read, _ = self.scan(q[b, t][None], key, gate, g[b, t, m][None],
                                    [(gate[..., None] * v[b, t][None], key)], document[b, t][None])
                weight = 1 if m == 0 else share[b][slot][:, None, None]
                mixed = mixed.index_add(0, t, weight * read[0])
            o.append(mixed)
        return self.output(torch.stack(o), xn)


# --- section 12: gated linear attention ---------------------------------------------------------------------


class GatedLinear(GatedDelta):
    def __init__(self, c: Config, name: str):
        super().__init__(c, name)
        self.gk_proj = nn.ModuleList([Weight(16, self.D), Weight(self.H * self.K, 16)])

    def forward(self, xn: Tensor, document: Tensor) -> Tensor:
        q, k, v = self.qkv(xn, document)
        alpha = self.heads(self.gk_proj[1](self.gk_proj[0](xn))).sigmoid() ** (1 / 16)
        w = wide(self.b_proj(xn)).sigmoid()[..., None] * v
        S, o = torch.zeros_like(w[:, 0, :, :, None] * k[:, 0, :, None, :]), []
        for t in range(xn.shape[1]):
            if t > 0:
                opens = document[:, t] != document[:, t - 1]
                S = torch.where(opens[:, None, None, None], 0, S)
            S = alpha[:, t, :, None, :] * S + w[:, t, :, :, None] * k[:, t, :, None, :]
            o.append((S @ q[:, t, :, :, None]).squeeze(-1))
        return self.output(torch.stack(o, 1), xn)


# --- the model ----------------------------------------------------------------------------------------------


class Layer(nn.Module):
    def __init__(self, c: Config, name: str):
        super().__init__()
        self.c = c
        self.attn_norm, self.mlp_norm = Weight(c.hidden_size), Weight(c.hidden_size)
        if name not in MIXERS:
            raise ValueError(f"mixers: expected one of {sorted(MIXERS)}, got {name}")
        if name == "attention":
            self.attn = Attention(c)
        else:
            kinds = {"prism-loop": PrismLoop, "mom": MixtureOfMemories, "gla": GatedLinear}
            self.attn = kinds.get(name, GatedDelta)(c, name)
        self.mlp = FeedForward(c)

    def forward(self, x: Tensor, document: Tensor) -> Tensor:
        x = x + self.attn(rms_norm(x, self.attn_norm.weight, self.c.norm_eps), document)
        return x + self.mlp(rms_norm(x, self.mlp_norm.weight, self.c.norm_eps))


class Prism(nn.Module):
    def __init__(self, c: Config):
        super().__init__()
        self.c = c
        self.model = nn.Module()
        self.model.embeddings = Weight(c.vocab_size, c.hidden_size)
        self.model.layers = nn.ModuleList(Layer(c, c.mixer(n)) for n in range(c.num_hidden_layers))
        self.model.norm = Weight(c.hidden_size)
        self.lm_head = None if c.tie_word_embeddings else Weight(c.vocab_size, c.hidden_size)

    def states(self, tokens: Tensor, segment: Tensor | None = None) -> Tensor:
        """tokens, segment: int64 [B,T]. Returns what the head reads, [B,T,D]."""
        # A document is a maximal run of equal segment ids: numbered here, so an id that comes back is new.
        document = torch.zeros_like(tokens)
        if segment is not None:
            document[:, 1:] = (segment[:, 1:] != segment[:, :-1]).cumsum(1)
        x = F.embedding(tokens, self.model.embeddings.weight)
        for layer in self.model.layers:
            x = layer(x, document)
        return rms_norm(x, self.model.norm.weight, self.c.norm_eps)

    def head(self, x: Tensor) -> Tensor:
        return (self.lm_head or self.model.embeddings)(x)

    def forward(self, tokens: Tensor, targets: Tensor | None = None, segment: Tensor | None = None):
        """tokens, targets, segment: int64 [B,T]. Returns loss (None without targets), logits [B,T,vocab]."""
        logits = self.head(self.states(tokens, segment))
        if targets is None:
            return None, logits
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1), logits

    @staticmethod
    def from_checkpoint(directory: str | Path) -> "Prism":
        """Names and shapes must be the config's exactly. The model has the dtype of the file's embeddings."""
        tensors = load_file(Path(directory) / "model.safetensors")
        model = Prism(Config.read(Path(directory) / "config.json"))
        model = model.to(tensors["model.embeddings.weight"].dtype)
        model.load_state_dict(tensors, strict=True)
        return model
