"""The model in eager PyTorch, float32 on the CPU, with the reference's chunked scan.

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
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import safe_open
from torch import Tensor

TESTS = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(TESTS / "reference"))
import prism_twin  # noqa: E402
from prism_twin import Config, Mixer, Prism, chunked_scan  # noqa: E402


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
    Mixer.scan = staticmethod(partial(chunked_scan, C=C))
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
