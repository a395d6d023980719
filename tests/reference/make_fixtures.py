"""Writes tests/fixtures/: small models in float64 with the loss, logits and gradients that the twin computes.

    python tests/reference/make_fixtures.py          needs torch, numpy and safetensors; about a minute

A fixture of a model is a directory: config.json and model.safetensors (SPEC section 8, F64), and what `prism
grad --dtype f64 [--separator ID]` writes for it, expected.safetensors: loss [], logits [B,T,vocab] and
grad.NAME of every parameter, beside the input, tokens I32 [B T + 1], one stream: row b starts at id b T,
targets are the next ids. Where there are documents, its metadata names the `separator`: a document begins at
each position that holds that id.

Before a fixture is written, its gradient is checked by central differences along a random direction, and its
documents by running each alone. Seeds are fixed: the same PyTorch writes the same files.
"""
import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from prism_twin import Config, Prism

OUT = Path(__file__).resolve().parent.parent / "fixtures"
SEPARATOR = 2

# K is odd, no two widths are equal and norm_eps is not l2norm's: what could be confused shows.
SMALL = dict(model_type="prism", vocab_size=20, hidden_size=12, num_hidden_layers=1, num_heads=2, head_dim=5,
             expand_v=1.4, intermediate_size=11, conv_size=4, norm_eps=1e-5, tie_word_embeddings=True,
             solver_dim=3)
PRISM = SMALL | dict(mixers="prism", rank=3)
LOOP = SMALL | dict(mixers="prism-loop", rank=3, expand_v=1.2)  # H V = D
TWO = dict(num_hidden_layers=2)

# name: (config, batch, seq, documents). Its place is its seed, so a new one goes to the end.
CASES: dict[str, tuple[dict, int, int, bool]] = {
    **{name: (SMALL | TWO | dict(mixers=name), 2, 70, True)
       for name in ("linear", "retnet", "mamba2", "deltanet")},
    "gdn": (SMALL | TWO | dict(mixers="gdn", model_type="gated_deltanet"), 1, 131, True),
    "prism": (PRISM | TWO, 1, 131, True),
    "prism-loop": (LOOP | TWO, 1, 131, True),
    "prism-rank-1": (SMALL | dict(mixers="prism", rank=1, head_dim=8, expand_v=2), 2, 70, True),
    "prism-rank-2-one-document": (PRISM | dict(rank=2), 1, 131, False),
    "prism-rank-4-conv-2": (PRISM | dict(rank=4, conv_size=2), 2, 70, True),
    "prism-loop-rank-1": (LOOP | dict(rank=1), 2, 70, True),
    "prism-loop-rank-2-one-document": (LOOP | dict(rank=2, conv_size=2), 1, 67, False),
    "prism-residual-anchor": (PRISM | dict(solver_residual="anchor"), 2, 70, True),
    "prism-gain-gelu": (PRISM | dict(solver_gain="gelu"), 2, 70, True),
    "prism-no-key-norm": (PRISM | dict(solver_key_norm=False), 2, 70, True),
    "prism-all-others": (PRISM | dict(solver_residual="anchor", solver_gain="gelu", solver_key_norm=False,
                                      ablations=["no_retain", "first_base_key"]), 2, 70, True),
    **{f"prism-{off.replace('_', '-')}": (PRISM | dict(ablations=[off]), 2, 70, True)
       for off in ("shared_key", "base_key", "first_base_key", "no_retain", "no_anchor", "no_gain")},
    **{f"prism-loop-{off.replace('_', '-')}": (LOOP | dict(ablations=[off]), 2, 70, True)
       for off in ("no_gelu", "no_anchor", "no_gain")},
    "mixed-untied": (LOOP | dict(num_hidden_layers=3, mixers=["retnet", "prism-loop", "prism"],
                                 tie_word_embeddings=False), 2, 70, True),
    "attention": (SMALL | TWO | dict(mixers="attention"), 1, 131, True),
    "attention-hybrid-one-document": (PRISM | TWO | dict(mixers=["prism", "attention"], attention_heads=3),
                                      2, 67, False),
    "ttt-mlp": (SMALL | dict(mixers="ttt-mlp", expand_v=1), 2, 70, True),
    "mixed-no-output-gate": (LOOP | TWO | dict(mixers=["prism", "prism-loop"], rank=2, use_gate=False), 2, 70, True),
    "mom": (SMALL | TWO | dict(mixers="mom", memories=3, memories_active=2), 2, 70, True),
    "gla": (SMALL | TWO | dict(mixers="gla"), 2, 70, True),
}


SEEDS = {"mixed-no-output-gate": 26, "ttt-mlp": 26}  # were written at other places


def random_model(config: Config, generator: torch.Generator) -> Prism:
    """Values that leave nothing trivial: norm weights away from 1, gates half open, decays of all sizes."""
    model = Prism(config).double()
    with torch.no_grad():
        for name, p in model.named_parameters():
            draw = torch.randn(p.shape, generator=generator, dtype=p.dtype)
            if name.endswith("norm.weight"):
                p.copy_(1 + 0.3 * draw)
            elif name.endswith(("A_log", "gate.bias")):
                p.copy_(draw)
            elif name.endswith("dt_bias"):
                p.copy_(draw - 2)
            else:
                p.copy_(draw * p.shape[-1] ** -0.5)  # unit variance in, unit variance out
    return model


def random_tokens(B: int, T: int, vocab: int, documents: bool, generator: torch.Generator) -> Tensor:
    """The stream: documents of one token, of more than a chunk, and over the chunk border at 64."""
    stream = torch.randint(SEPARATOR + 1, vocab, (B * T + 1,), generator=generator)
    if documents:
        for b in range(B):
            stream[[b * T + t for t in ((0, 3, 4, 6, 42) if b == 0 else (1, 26, 63, 64, 69))]] = SEPARATOR
    return stream


def rows(stream: Tensor, B: int, T: int, documents: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    tokens, targets = stream[:-1].view(B, T), stream[1:].view(B, T)
    return tokens, targets, (tokens == SEPARATOR).cumsum(1) if documents else None


def check_gradient(model: Prism, loss_of, generator: torch.Generator) -> None:
    """Central differences along one random unit direction through all parameters."""
    parameters = list(model.parameters())
    direction = [torch.randn(p.shape, generator=generator, dtype=p.dtype) for p in parameters]
    length = sum(d.square().sum() for d in direction).sqrt()
    direction = [d / length for d in direction]
    slope = sum((p.grad * d).sum() for p, d in zip(parameters, direction)).item()
    values, h = [], 1e-5
    with torch.no_grad():
        for step in (h, -2 * h, h):  # to +h, to -h, and back
            for p, d in zip(parameters, direction):
                p.add_(d, alpha=step)
            values.append(loss_of().item())
    measured = (values[0] - values[1]) / (2 * h)
    assert abs(measured - slope) < 1e-7 * max(1, abs(slope)), (measured, slope)


def check_documents(model: Prism, tokens: Tensor, segment: Tensor, logits: Tensor) -> None:
    """Each document alone, as a row of its own, has the logits it has within its row."""
    for b in range(tokens.shape[0]):
        for document in segment[b].unique():
            inside = segment[b] == document
            alone = model(tokens[b, inside][None])[1][0]
            assert torch.allclose(alone, logits[b, inside], rtol=1e-11, atol=1e-12), (b, document)


def make(name: str, seed: int) -> None:
    values, B, T, documents = CASES[name]
    directory = OUT / name
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(values, indent=2) + "\n")
    generator = torch.Generator().manual_seed(seed)
    model = random_model(Config.read(directory / "config.json"), generator)
    save_file({n: p.detach() for n, p in model.named_parameters()}, directory / "model.safetensors")

    model = Prism.from_checkpoint(directory)  # as any reader of the fixture would
    stream = random_tokens(B, T, values["vocab_size"], documents, generator)
    tokens, targets, segment = rows(stream, B, T, documents)
    loss, logits = model(tokens, targets, segment)
    loss.backward()
    for p in model.parameters():  # an ablation leaves its tensors in place, with zero gradient
        p.grad = torch.zeros_like(p) if p.grad is None else p.grad
    gradients = {f"grad.{n}": p.grad for n, p in model.named_parameters()}
    expected = dict(loss=loss.detach(), logits=logits.detach(), tokens=stream.int(), **gradients)
    # One key only: safetensors writes several in an order that changes from run to run.
    metadata = dict(separator=str(SEPARATOR)) if documents else None
    save_file(expected, directory / "expected.safetensors", metadata)

    check_gradient(model, lambda: model(tokens, targets, segment)[0], generator)
    if documents:
        with torch.no_grad():
            check_documents(model, tokens, segment, logits)
    zero = [n for n, g in gradients.items() if not g.any()]
    print(f"{name:32} loss {loss.item():.12f}  no gradient: {' '.join(zero) or '-'}", flush=True)


def make_adamw(steps: int = 10, clip: float = 1.0) -> None:
    """Ten steps of clipping and AdamW (SPEC section 9): a matrix, which decays, a bias, which does not.

    Per step s, [10,...]: grad.NAME before clipping, norm of both, clipped.NAME, lr, and NAME after the step.
    """
    generator = torch.Generator().manual_seed(100)
    parameters = {name: torch.nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64))
                  for name, shape in (("matrix", (5, 3)), ("bias", (7,)))}
    optimizer = torch.optim.AdamW([dict(params=[parameters["matrix"]], weight_decay=0.1),
                                   dict(params=[parameters["bias"]], weight_decay=0.0)],
                                  betas=(0.9, 0.95), eps=1e-8)
    out: dict[str, list[Tensor]] = {}

    def record(prefix: str, tensors: dict[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            out.setdefault(prefix + name, []).append(tensor.detach().clone())

    record("initial.", parameters)
    for step in range(steps):
        lr = 1e-2 * min(1, (step + 1) / 3) * (1 - 0.08 * step)  # rises, then falls
        scale = (0.05, 0.5, 3.0)[step % 3]  # norms on both sides of the clip
        for group in optimizer.param_groups:
            group["lr"] = lr
        for p in parameters.values():
            p.grad = scale * torch.randn(p.shape, generator=generator, dtype=p.dtype)
        record("grad.", {name: p.grad for name, p in parameters.items()})
        norm = torch.nn.utils.clip_grad_norm_(parameters.values(), clip)
        record("clipped.", {name: p.grad for name, p in parameters.items()})
        optimizer.step()
        record("", parameters | dict(norm=norm, lr=torch.tensor(lr, dtype=torch.float64)))
    stacked = {name: torch.stack(v).squeeze(0) for name, v in out.items()}
    save_file(stacked, OUT / "adamw.safetensors")
    print("adamw: norms " + " ".join(f"{n:.3f}" for n in stacked["norm"].tolist()))


if __name__ == "__main__":
    torch.set_num_threads(1)
    for seed, case in enumerate(CASES):
        make(case, SEEDS.get(case, seed))
    make_adamw()
