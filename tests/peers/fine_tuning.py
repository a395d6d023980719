"""The bypass as fine-tuning: a trained Gated DeltaNet moved to another domain in three ways at several learning rates.

    fine_tuning.py run   --out DIR --base-data PATH --base-val PATH --data PATH --val PATH [--seeds N] [--prism P]
    fine_tuning.py table --out DIR

`run` trains the base on --base-data, then tunes it on --data: all of it (full), only a solver of rank 3 that
`prism init --from` adds and that changes nothing at the start (bypass), or only the mixer of its last layer, about
as many weights (last layer). Each learning rate is tried with the first seed, the best one with the others. A line
of DIR/runs.jsonl a run: validation loss in the new domain and in the old one (what was forgotten), and how many
tensors of the base differ afterwards, bit for bit. Runs already there are not repeated. `table` needs no GPU.
"""
import argparse
import json
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from runs import mean_and_interval, read, train

RATES = {"full": [1e-4, 3e-4, 1e-3, 3e-3], "bypass": [1e-3, 3e-3, 1e-2, 3e-2],
         "last layer": [3e-4, 1e-3, 3e-3, 1e-2]}


def tensors(model: Path) -> dict[str, bytes]:
    """Bytes of every tensor of a checkpoint."""
    file = (model / "model.safetensors").read_bytes()
    start = 8 + int.from_bytes(file[:8], "little")
    header = json.loads(file[8:start])
    return {name: file[start + of["data_offsets"][0]:start + of["data_offsets"][1]]
            for name, of in header.items() if name != "__metadata__"}


def loss_on(o: argparse.Namespace, model: Path, data: str) -> float:
    table = model.parent / f"{model.name}.json"
    subprocess.run([o.prism, "eval", "--model", str(model), "--data", data, "--device", o.device, "--json", str(table)],
                   check=True, capture_output=True)
    return json.loads(table.read_text())["results"][0]["loss"]


def tune(o: argparse.Namespace, how: str, lr: float, seed: int) -> dict:
    base, out = o.out / "base", o.out / f"{how.replace(' ', '-')}-{lr:g}-{seed}"
    frozen = {"full": [], "bypass": ["--freeze", "base"], "last layer": ["--train-only", o.last_layer]}[how]
    numbers = dict(steps=o.steps, batch=o.batch, seq=o.seq, accumulate=1, lr=lr, seed=seed, device=o.device)
    numbers |= {"weight-decay": 0}
    result = train(o.prism, out, ["--model", str(o.out / "bypass" if how == "bypass" else base), *frozen,
                                  "--data", o.data, "--val", o.val], numbers, keep=True)
    before, after = tensors(base), tensors(out)
    trained = sum(len(b) for name, b in after.items() if before.get(name) != b)
    record = dict(how=how, lr=lr, seed=seed, **result, new=loss_on(o, out, o.val), old=loss_on(o, out, o.base_val),
                  base_tensors_changed=sum(after[name] != b for name, b in before.items()), trained_bytes=trained)
    shutil.rmtree(out)
    with (o.out / "runs.jsonl").open("a") as file:
        print(json.dumps(record), file=file)
    print(f"{how:10}  lr {lr:<6g} seed {seed}  new domain {record['new']:.4f}  old {record['old']:.4f}", flush=True)
    return record


def run(o: argparse.Namespace) -> None:
    base, bypass = o.out / "base", o.out / "bypass"
    if not base.exists():
        numbers = dict(steps=o.base_steps, batch=o.batch, seq=o.seq, accumulate=1, lr=2e-3, seed=1, device=o.device)
        train(o.prism, base, ["--config" if o.preset.endswith(".json") else "--preset", o.preset, "--data", o.base_data, "--val", o.base_val], numbers, keep=True)
    if not bypass.exists():
        subprocess.run([o.prism, "init", "--from", str(base), "--rank", "3", "--solver-dim", "32", "--seed", "1",
                        "--out", str(bypass)], check=True)
    layers = json.loads((base / "config.json").read_text())["num_hidden_layers"]
    o.last_layer = f"model.layers.{layers - 1}.attn"
    done = {(r["how"], r["lr"], r["seed"]): r for r in read(o.out / "runs.jsonl")}
    if not any(r["how"] == "none" for r in done.values()):
        for model in (base, bypass):
            record = dict(how="none", lr=0, seed=0 if model == base else 1, new=loss_on(o, model, o.val),
                          old=loss_on(o, model, o.base_val), base_tensors_changed=0, trained_bytes=0)
            with (o.out / "runs.jsonl").open("a") as file:
                print(json.dumps(record), file=file)
    with ThreadPoolExecutor(o.threads) as pool:
        def all_of(work: list[tuple[str, float, int]]) -> None:
            for job, record in zip(todo := [job for job in work if job not in done],
                                   pool.map(lambda job: tune(o, *job), todo)):
                done[job] = record
        all_of([(how, lr, 1) for how, rates in RATES.items() for lr in rates])
        best = {how: min(rates, key=lambda lr: done[how, lr, 1]["new"]) for how, rates in RATES.items()}
        all_of([(how, best[how], seed) for how in RATES for seed in range(2, o.seeds + 1)])


def table(o: argparse.Namespace) -> None:
    rows = read(o.out / "runs.jsonl")
    print("| tuned | learning rate | trained weights | new domain | old domain | base tensors changed |\n"
          "|---|---|---|---|---|---|")
    for r in rows:
        if r["how"] == "none":
            name = "bypass added, untrained" if r["seed"] else "nothing"
            print(f"| {name} | | | {r['new']:.4f} | {r['old']:.4f} | 0 |")
    for how, rates in RATES.items():
        for lr in rates:
            of = [r for r in rows if r["how"] == how and r["lr"] == lr]
            if of:
                new, old = (mean_and_interval([r[key] for r in of]) for key in ("new", "old"))
                print(f"| {how} | {lr:g} | {of[0]['trained_bytes'] // 4:,} | {new} | {old} | "
                      f"{of[0]['base_tensors_changed']} |")
    sizes = [(o.out / name / "model.safetensors").stat().st_size for name in ("base", "bypass")]
    print(f"\nmodel.safetensors: base {sizes[0]:,} bytes, with the bypass {sizes[1]:,} ({sizes[1] - sizes[0]:,} more)")


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("part", choices=["run", "table"])
    p.add_argument("--out", type=Path, required=True, help="directory of the results")
    p.add_argument("--prism", default="build/prism")
    p.add_argument("--device", default="cuda")
    for name in ("base-data", "base-val", "data", "val"):
        p.add_argument(f"--{name}", help="a data set of `prism tokenize`, or anything else it trains on")
    p.add_argument("--preset", default="gdn-15m", help="of the base, or a config.json")
    p.add_argument("--base-steps", type=int, default=1200)
    p.add_argument("--steps", type=int, default=300)
    p.add_argument("--batch", type=int, default=32)
    p.add_argument("--seq", type=int, default=512)
    p.add_argument("--seeds", type=int, default=3)
    p.add_argument("--threads", type=int, default=3, help="runs at once")
    o = p.parse_args()
    if o.part == "run" and not (o.base_data and o.base_val and o.data and o.val):
        p.error("run needs --base-data, --base-val, --data and --val")
    o.out.mkdir(parents=True, exist_ok=True)
    dict(run=run, table=table)[o.part](o)


if __name__ == "__main__":
    main()
