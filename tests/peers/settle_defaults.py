"""The experiment that settles the solver's defaults (SPEC section 4): recall probes and language modeling.

    settle_defaults.py probe --out DIR [--task T..] [--steps N] [--seeds N]      the grid, in one process
    settle_defaults.py lm    --out DIR --data PATH.. [--model NAME=KEY=VALUE;..] finalists, paired seeds
    settle_defaults.py table --out DIR                                           what they say

`probe` runs `prism probe` on rank 1, 2 and 4 of every combination of solver_residual, solver_gain,
solver_key_norm and solver_gate_init, and leaves DIR/probe.jsonl. `lm` trains the 15 M preset once for each
model and seed, several processes at a time, and adds a line for each run to DIR/lm.jsonl; runs already there
are not repeated, so it goes on after an interruption. `table` needs no GPU: the mean accuracy of each rank, of
each value of each key over all values of the others, of the best models; the mean validation loss with a 95 %
interval, and the paired difference from the first model.
"""
import argparse
import json
import statistics
import subprocess
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from runs import mean_and_interval, read, train

GRID = {"solver_residual": ["value", "anchor"], "solver_gain": ["sigmoid", "gelu"],
        "solver_key_norm": ["true", "false"], "solver_gate_init": ["-2", "0", "2"]}
# The first is what the others are compared with.
MODELS = ["rank1=rank=1", "rank2=rank=2", "rank3=rank=3"]


def probe(o: argparse.Namespace) -> None:
    grid = [f"{key}={','.join(values)}" for key, values in GRID.items()]
    subprocess.run([o.prism, "probe", "--task", *o.task, "--mixer", "gdn,prism", "--rank", "2,4", "--set", *grid,
                    "--steps", str(o.steps), "--seeds", str(o.seeds), "--device", o.device,
                    "--threads", str(o.threads), "--json", str(o.out / "probe.jsonl")], check=True)


def run(o: argparse.Namespace, model: str, seed: int) -> dict:
    name, _, settings = model.partition("=")
    numbers = dict(steps=o.steps, batch=o.batch, seq=o.seq, lr=o.lr, seed=seed, device=o.device)
    of = ["--preset", o.preset, "--data", *o.data] + (["--set", *settings.split(";")] if settings else [])
    return dict(model=name, settings=settings, seed=seed, steps=o.steps, tokens=o.steps * o.batch * o.seq,
                **train(o.prism, o.out / f"run-{name}-{seed}", of, numbers, o.keep))


def lm(o: argparse.Namespace) -> None:
    path = o.out / "lm.jsonl"
    done = {(r["model"], r["seed"]) for r in read(path)}
    # Seed by seed, so that what there is after an interruption is paired.
    work = [(model, seed) for seed in range(1, o.seeds + 1) for model in o.model or MODELS
            if (model.partition("=")[0], seed) not in done]
    with ThreadPoolExecutor(o.threads) as pool, path.open("a") as file:
        for result in pool.map(lambda job: run(o, *job), work):
            print(json.dumps(result), file=file, flush=True)
            print(f"{result['model']:24} seed {result['seed']}  validation {result['val_loss']:.4f}  "
                  f"{result['tokens_per_second']:,.0f} tokens/s", flush=True)


def table(o: argparse.Namespace) -> None:
    rows = read(o.out / "probe.jsonl")
    for task in dict.fromkeys(r["task"] for r in rows):
        here = [r for r in rows if r["task"] == task]
        print(f"\n{task}: mean accuracy over {len(here[0]['seeds'])} seeds")
        groups = defaultdict(list)
        for r in here:
            c = r["config"]
            groups[f"rank {c['rank']}"].append(r["accuracy"])
            if c["rank"] > 1:
                for key in GRID:
                    groups[f"{key} {c[key]}"].append(r["accuracy"])
        for name, values in sorted(groups.items()):
            print(f"  {name:26} {statistics.mean(values):.3f}  ({min(values):.3f} .. {max(values):.3f})  "
                  f"{len(values)} models")
        for r in sorted(here, key=lambda r: -r["accuracy"])[:5]:
            print(f"  best: {r['model']:36} {r['accuracy']:.3f}")
    by_model = defaultdict(dict)
    for r in read(o.out / "lm.jsonl"):
        by_model[r["model"]][r["seed"]] = r
    first = next(iter(by_model.values()), {})
    for name, runs in by_model.items():
        losses = [r["val_loss"] for r in runs.values()]
        paired = [r["val_loss"] - first[seed]["val_loss"] for seed, r in runs.items() if seed in first]
        speed = statistics.median(r["tokens_per_second"] for r in runs.values())
        print(f"{name:24} {len(runs)} seeds  validation {mean_and_interval(losses)}  "
              f"difference {mean_and_interval(paired)}  {speed:,.0f} tokens/s  {next(iter(runs.values()))['memory']}")


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("part", choices=["probe", "lm", "table"])
    p.add_argument("--out", type=Path, required=True, help="directory of the results")
    p.add_argument("--prism", default="build/prism")
    p.add_argument("--device", default="cuda")
    p.add_argument("--task", nargs="+", default=["recall:32:256"])
    p.add_argument("--data", nargs="+", default=[])
    p.add_argument("--model", action="append", help="NAME=KEY=VALUE;..: a finalist; several times")
    p.add_argument("--preset", default="prism-15m")
    p.add_argument("--steps", type=int, help="5000 for probe, 1000 for lm")
    p.add_argument("--seeds", type=int, help="2 for probe, 5 for lm")
    p.add_argument("--batch", type=int, default=32, help="rows of a step of lm")
    p.add_argument("--seq", type=int, default=512, help="tokens of a row of lm")
    p.add_argument("--lr", type=float, default=2e-3, help="of lm")
    p.add_argument("--threads", type=int, help="runs at once: 16 for probe, 3 for lm")
    p.add_argument("--keep", action="store_true", help="keep the trained models of lm")
    o = p.parse_args()
    defaults = dict(probe=dict(steps=5000, seeds=2, threads=16), lm=dict(steps=1000, seeds=5, threads=3))
    for name, value in defaults.get(o.part, {}).items():
        if getattr(o, name) is None:
            setattr(o, name, value)
    if o.part == "lm" and not o.data:
        p.error("lm needs --data")
    o.out.mkdir(parents=True, exist_ok=True)
    dict(probe=probe, lm=lm, table=table)[o.part](o)


if __name__ == "__main__":
    main()
