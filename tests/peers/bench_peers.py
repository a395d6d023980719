"""Times this engine and flash-linear-attention (FLA) on one NVIDIA GPU in one run; prints the table.

    bench_peers.py [GROUP...] [--prism build/prism] [--log FILE]

GROUP: train, long, op, op-long, generate; all of them by default.

A training step is bf16, batch x T = 65,536 tokens: forward, reverse and AdamW, with clipping for the engine
and without for FLA. Each row is a process of its own, so the time from its start to its first step counts
the autotuning. Median of 8 steps after 3. FLA needs minutes a shape on a fresh machine: name groups where
time is short. `--log` keeps every measurement as a line of JSON; rows already in it are not run again.

The engine's rows are calls of `prism bench --device cuda --json`, which prints one object, for example
    --preset NAME --batch B --seq T  {"params": 1.2e8, "tokens_per_s": 1e5, "GiB": 22, "first_step_s": 1.8}
    --scan B:T:H:K:V:L               {"forward_ms": 0.5, "forward_backward_ms": 1.8}
    --preset NAME --generate N       {"tokens_per_s": 5000}

FLA refuses its gated reverse pass on Hopper under Triton 3.4.0 to 3.7.0, which computes wrong gradients
there. The refusal is switched off here: the same kernels take the same time, and the gradients are not used.
"""
import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

START = time.time()
GEMM_CEILING = 750e12  # FLOP/s: bf16 8192^3 on the H200 of the targets
SCAN = "32:2048:4:128:256"
SCAN_LONG = "1:65536:4:128:256"

# group: rows as (who, what); what: the arguments of `prism bench`, or FLA's MODEL:B:T or op:B:T:H:K:V.
ROWS: dict[str, list[tuple[str, str]]] = {
    "train": [("prism", "--preset gdn-119m --batch 32 --seq 2048"),
              ("prism", "--preset prism-124m --batch 32 --seq 2048"),
              ("fla", "gdn:32:2048"), ("fla", "product3:32:2048")],
    "long": [("prism", "--preset prism-124m --batch 4 --seq 16384"),
             ("prism", "--preset prism-124m --batch 1 --seq 65536"), ("fla", "gdn:4:16384")],
    "op": [("prism", f"--scan {SCAN}:1"), ("prism", f"--scan {SCAN}:3"), ("fla", f"op:{SCAN}")],
    "op-long": [("prism", f"--scan {SCAN_LONG}:1"), ("fla", f"op:{SCAN_LONG}")],
    "generate": [("prism", "--preset prism-124m --generate 10000")],
}


# --- FLA's rows, each in a process of its own ---------------------------------------------------------------


def median_ms(run: Callable[[], None], warm: int, runs: int) -> float:
    import torch
    for _ in range(warm):
        run()
    times = []
    for _ in range(runs):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times)


def fla_train(kind: str, batch: int, seq: int) -> dict:
    """The 119 M Gated DeltaNet, or its rank-3 peer, Gated DeltaProduct with 3 Householder steps a token."""
    import torch
    from fla import models
    if kind == "gdn":
        Config, Model, more = models.GatedDeltaNetConfig, models.GatedDeltaNetForCausalLM, {}
    else:
        Config, Model = models.GatedDeltaProductConfig, models.GatedDeltaProductForCausalLM
        more = dict(use_forget_gate=True, num_householder=int(kind.removeprefix("product")))
    if isinstance(Model._tied_weights_keys, list):  # older FLA under transformers 5, which wants a mapping
        Model._tied_weights_keys = {"lm_head.weight": "model.embeddings.weight"}
    config = Config(hidden_size=768, num_hidden_layers=12, num_heads=4, head_dim=128, expand_v=2,
                    vocab_size=32000, tie_word_embeddings=True, **more)
    torch.manual_seed(0)
    model = Model(config).to("cuda", torch.bfloat16).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    ids = torch.randint(config.vocab_size, (batch, seq), device="cuda")

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()

    step()
    torch.cuda.synchronize()
    first = time.time() - START
    torch.cuda.reset_peak_memory_stats()
    ms = median_ms(step, 3, 8)
    return dict(params=sum(p.numel() for p in model.parameters()), ms=ms, tokens_per_s=batch * seq / ms * 1e3,
                GiB=torch.cuda.max_memory_allocated() / 2**30, first_step_s=first)


def fla_op(B: int, T: int, H: int, K: int, V: int) -> dict:
    import torch
    import torch.nn.functional as F
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    def random(*shape: int):
        return torch.randn(*shape, device="cuda")

    q, k, v = random(B, T, H, K), F.normalize(random(B, T, H, K), dim=-1), random(B, T, H, V)
    beta, g = random(B, T, H).sigmoid(), F.logsigmoid(random(B, T, H) + 4)
    q, k, v, beta = (x.bfloat16().requires_grad_() for x in (q, k, v, beta))
    g.requires_grad_()
    d_o = random(B, T, H, V).bfloat16()

    def forward():
        return chunk_gated_delta_rule(q, k, v, g=g, beta=beta)[0]

    def forward_backward() -> None:
        forward().backward(d_o)
        for x in (q, k, v, g, beta):
            x.grad = None

    return dict(forward_ms=median_ms(forward, 3, 10), forward_backward_ms=median_ms(forward_backward, 3, 10))


def fla_row(row: str) -> dict:
    import fla.ops.common.chunk_o as chunk_o
    if hasattr(chunk_o, "IS_NVIDIA_HOPPER"):
        chunk_o.IS_NVIDIA_HOPPER = False
    kind, *sizes = row.split(":")
    return fla_op(*map(int, sizes)) if kind == "op" else fla_train(kind, *map(int, sizes))


# --- running and printing -----------------------------------------------------------------------------------


def measure(who: str, what: str, prism: str) -> dict:
    command = ([sys.executable, __file__, "--fla-row", what] if who == "fla" else
               [prism, "bench", "--device", "cuda", "--json", *what.split()])
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    lines = done.stdout.strip().splitlines()
    if done.returncode != 0 or not lines:
        return dict(failed=f"exit {done.returncode}")
    return json.loads(lines[-1])


def ratio(a: float | None, b: float | None) -> float | None:
    return a / b if a is not None and b else None


def table(of: Callable[[str, str, str], float | None]) -> str:
    """`of(who, what, key)` is a measured number, or None where that row was not run or failed."""
    gdn, prism3 = "--preset gdn-119m --batch 32 --seq 2048", "--preset prism-124m --batch 32 --seq 2048"
    scan, scan3, long = f"--scan {SCAN}:1", f"--scan {SCAN}:3", f"--scan {SCAN_LONG}:1"
    fla_gdn, fla_product, speed = "gdn:32:2048", "product3:32:2048", "tokens_per_s"
    lines = ["| what | this engine | FLA | ratio | target |", "|---|---|---|---|---|"]

    def add(what: str, ours: float | None, theirs: float | None, target: str, form: str, best: str = "most"):
        times = ratio(ours, theirs) if best == "most" else ratio(theirs, ours)
        cells = ((ours, form), (theirs, form), (times, ".2f"))
        shown = ["-" if number is None else format(number, f) for number, f in cells]
        lines.append("| " + " | ".join([what, *shown, target]) + " |")

    def compare(what: str, ours: str, theirs: str, key: str, target: str, form: str, best: str = "most"):
        add(what, of("prism", ours, key), of("fla", theirs, key), target, form, best)

    compare("gdn-119m, T 2048, tokens/s", gdn, fla_gdn, speed, "560,000 (1.5 x)", ",.0f")
    compare("prism-124m (rank 3) against rank 1", prism3, fla_gdn, speed, "470,000 (1.25 x)", ",.0f")
    compare("prism-124m against Gated DeltaProduct 3", prism3, fla_product, speed, "1.9 x", ",.0f")
    for batch, seq, target in ((4, 16384, ".95"), (1, 65536, ".80")):
        ours = of("prism", f"--preset prism-124m --batch {batch} --seq {seq}", speed)
        theirs = of("fla", f"gdn:{batch}:{seq}", speed)
        shares = ratio(ours, of("prism", prism3, speed)), ratio(theirs, of("fla", fla_gdn, speed))
        add(f"prism-124m, T {seq} as a share of T 2048 (FLA: rank 1)", *shares, target, ".2f")
    for key, target, target_long in (("forward_ms", "0.5", "1.4"), ("forward_backward_ms", "1.8", "4")):
        name = key.removesuffix("_ms").replace("_backward", " + reverse")
        compare(f"scan B 32, T 2048, {name}, ms", scan, f"op:{SCAN}", key, target, ".2f", "least")
        compare(f"scan B 1, T 65536, {name}, ms", long, f"op:{SCAN_LONG}", key, target_long, ".2f", "least")
    ranks = ratio(of("prism", scan3, "forward_backward_ms"), of("prism", scan, "forward_backward_ms"))
    add("scan, forward + reverse, rank 3 over rank 1", ranks, None, "1.6", ".2f")
    compare("gdn-119m, peak GiB", gdn, fla_gdn, "GiB", "22", ".1f", "least")
    compare("prism-124m, peak GiB (FLA: DeltaProduct 3)", prism3, fla_product, "GiB", "26", ".1f", "least")
    compare("process start to first step, s", gdn, fla_gdn, "first_step_s", "2", ".1f", "least")
    mfu = []
    for who, what in (("prism", gdn), ("fla", fla_gdn)):
        flops = 6 * (of(who, what, "params") or 0) * (of(who, what, speed) or 0)
        mfu.append(flops / GEMM_CEILING if flops else None)
    add("gdn-119m, MFU of 750 TFLOP/s", *mfu, "53 %", ".1%")
    generated = of("prism", "--preset prism-124m --generate 10000", speed)
    add("prism-124m, generation, one stream, tokens/s", generated, None, "5,000", ",.0f")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("group", nargs="*", help=f"of {' '.join(ROWS)}; default: all")
    parser.add_argument("--prism", default="build/prism")
    parser.add_argument("--log", type=Path)
    parser.add_argument("--fla-row", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.fla_row:
        print(json.dumps(fla_row(args.fla_row)))
        return 0
    if unknown := set(args.group) - set(ROWS):
        parser.error(f"group: expected some of {' '.join(ROWS)}, got {' '.join(sorted(unknown))}")
    measured: dict[tuple[str, str], dict] = {}
    if args.log and args.log.exists():
        for line in args.log.read_text().splitlines():
            record = json.loads(line)
            measured[record["who"], record["what"]] = record
    for who, what in (row for group in args.group or ROWS for row in ROWS[group]):
        if (who, what) in measured:
            continue
        record = dict(who=who, what=what) | measure(who, what, args.prism)
        print(json.dumps(record), file=sys.stderr, flush=True)
        measured[who, what] = record
        if args.log and "failed" not in record:
            with args.log.open("a") as log:
                log.write(json.dumps(record) + "\n")
    print(table(lambda who, what, key: measured.get((who, what), {}).get(key)))
    return 1 if any("failed" in record for record in measured.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
