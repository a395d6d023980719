"""The model in eager PyTorch, float32 on the CPU, with the chunked scan in tensor operations.

    python tests/peers/eager_pytorch.py MODEL... [--batch 8] [--seq 512] [--threads 2] [--steps 10]
    python tests/peers/eager_pytorch.py --check        the chunked scan against the fixtures (float64)

MODEL is a checkpoint directory (`prism init --preset tiny --seed 0 --out DIR`) or a config.json. Timed:
forward, reverse, clipping and AdamW of one step on random tokens. Beside it stands PyTorch's own 1024^3
float32 product on the same threads, without which tokens/s of two builds say nothing.
"""
import argparse
import math
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import safe_open
from torch import Tensor

TESTS = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(TESTS / "reference"))
import prism_twin  # noqa: E402
from prism_twin import Config, Prism  # noqa: E402


def chunked_scan(q: Tensor, k: Tensor, beta: Tensor | None, g: Tensor | None,
                 writes: list[tuple[Tensor, Tensor]], document: Tensor, state: Tensor | None = None,
                 C: int = 64) -> tuple[Tensor, Tensor]:
    """SPEC section 2 over whole tensors; arguments and results are those of the twin's `scan`.

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
    J = a[..., -1:, None] * torch.eye(K, dtype=q.dtype)
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


def fast_conv(x: Tensor, weight: Tensor, document: Tensor) -> Tensor:
    """The twin's causal_conv without its masks where a row is one document (faster here than F.conv1d)."""
    if (document[:, -1] != document[:, 0]).any():
        return TWIN_CONV(x, weight, document)
    T, W = x.shape[1], weight.shape[-1]
    past = F.pad(x, (0, 0, W - 1, 0))
    return sum(past[:, j:j + T] * weight[:, 0, j] for j in range(W))


TWIN_CONV = prism_twin.causal_conv


def use_fast_forms(C: int = 64) -> None:
    """The twin's model with these in place of its own."""
    prism_twin.scan = lambda *args: chunked_scan(*args, C=C)
    prism_twin.causal_conv = fast_conv
    prism_twin.rms_norm = lambda x, weight, eps: F.rms_norm(x, weight.shape, weight, eps)



def relative_error(x: Tensor, reference: Tensor) -> float:
    norm = reference.norm()
    return ((x - reference).norm() / (norm if norm > 0 else 1)).item()


def check() -> int:
    """Every fixture in float64 through the chunked scan, for C in {1, 16, 64}."""
    failed = 0
    for directory in sorted(p.parent for p in TESTS.glob("fixtures/*/config.json")):
        with safe_open(directory / "expected.safetensors", "pt") as file:
            expected = {name: file.get_tensor(name) for name in file.keys()}
            separator = (file.metadata() or {}).get("separator")
        B, T = expected["logits"].shape[:2]
        stream = expected["tokens"].long()
        tokens, targets = stream[:-1].view(B, T), stream[1:].view(B, T)
        segment = (tokens == int(separator)).cumsum(1) if separator else None
        for C in (1, 16, 64):
            use_fast_forms(C)
            model = Prism.from_checkpoint(directory)
            loss, logits = model(tokens, targets, segment)
            loss.backward()
            errors = {"loss": relative_error(loss, expected["loss"]),
                      "logits": relative_error(logits, expected["logits"])}
            for name, p in model.named_parameters():
                grad = torch.zeros_like(p) if p.grad is None else p.grad
                errors["grad." + name] = relative_error(grad, expected["grad." + name])
            worst = max(errors, key=lambda name: errors[name])
            passed = errors[worst] < 1e-11  # two exact forms in float64: rounding alone lies between them
            failed += not passed
            print(f"{directory.name:32} C {C:3}  {errors[worst]:.1e} {worst}  {'PASS' if passed else 'FAIL'}")
    return 1 if failed else 0


@torch.no_grad()
def initialize(model: Prism) -> Prism:
    """The initial values of SPEC section 3 (the distributions; the engine has its own random numbers)."""
    c = model.c
    for name, p in model.named_parameters():
        if name.endswith("norm.weight"):
            p.fill_(1)
        elif name.endswith("A_log"):
            p.copy_((16 - p.uniform_(0, 16)).log())
        elif name.endswith("dt_bias"):
            dt = p.uniform_(math.log(0.001), math.log(0.1)).exp().clamp(min=1e-4)
            p.copy_(dt + (-torch.expm1(-dt)).log())
        elif name.endswith("gate.bias"):
            p.fill_(c.solver_gate_init)
        elif "conv" in name:
            p.uniform_(-c.conv_size**-0.5, c.conv_size**-0.5)
        else:
            last = name.endswith(("o_proj.weight", "down_proj.weight"))
            p.normal_(0, 0.02 / math.sqrt(2 * c.num_hidden_layers) if last else c.initializer_range)
    return model


def median_seconds(fn, runs: int) -> float:
    fn()  # warm-up
    times = []
    for _ in range(runs):
        start = time.perf_counter()
        fn()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def model_flops(model: Prism) -> float:
    """A token's, forward and reverse: 6 x matrix parameters (the head once) + 6 K V (3 + L) H a layer."""
    c = model.c
    head = c.vocab_size * c.hidden_size
    matrices = head + sum(p.numel() for name, p in model.model.layers.named_parameters()
                          if p.dim() >= 2 and "conv" not in name)
    ranks = (c.rank if c.mixer(n).startswith("prism") else 1 for n in range(c.num_hidden_layers))
    return 6 * matrices + sum(6 * c.head_dim * c.value_dim * (3 + rank) * c.num_heads for rank in ranks)


def bench(path: Path, batch: int, seq: int, steps: int) -> None:
    if path.is_dir() and (path / "model.safetensors").exists():
        model = Prism.from_checkpoint(path).float()
    else:
        model = initialize(Prism(Config.read(path / "config.json" if path.is_dir() else path)))
    use_fast_forms()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, (0.9, 0.95), weight_decay=0.1, fused=True)
    stream = torch.randint(model.c.vocab_size, (batch, seq + 1), generator=torch.Generator().manual_seed(0))

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        model(stream[:, :-1], stream[:, 1:])[0].backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    a, b = torch.randn(1024, 1024), torch.randn(1024, 1024)
    gemm = 2 * 1024**3 / median_seconds(lambda: a @ b, 20)
    seconds = median_seconds(step, steps)
    rate = batch * seq / seconds
    print(f"{path}: {batch} x {seq}, {torch.get_num_threads()} threads: {rate:,.0f} tokens/s "
          f"({seconds * 1e3:.0f} ms a step), {rate * model_flops(model) / 1e9:.1f} GFLOP/s; "
          f"1024^3 float32 product {gemm / 1e9:.1f} GFLOP/s; PyTorch {torch.__version__}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, nargs="*")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--seq", type=int, default=512)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    if not args.model and not args.check:
        parser.error("expected a MODEL, or --check")
    torch.set_num_threads(args.threads)
    for path in args.model:
        bench(path, args.batch, args.seq, args.steps)
    sys.exit(check() if args.check else 0)
