"""What the experiments here share: one training run as a process, results as lines of JSON, means with intervals."""
import json
import math
import re
import shutil
import statistics
import subprocess
from pathlib import Path

# Student's t by number of seeds
T_975 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365}


def train(prism: str, run: Path, model: list[str], numbers: dict, keep: bool = False) -> dict:
    """One run of `prism train`, logged twenty times and validated at its end: its last losses, speed and memory.
    `model` says which weights and data, `numbers` holds the options with a value."""
    shutil.rmtree(run, ignore_errors=True)
    steps = numbers["steps"]
    numbers = numbers | {"save-every": steps, "eval-every": steps, "log-every": max(1, steps // 20)}
    options = [word for name, value in numbers.items() for word in (f"--{name}", str(value))]
    done = subprocess.run([prism, "train", *model, "--out", str(run), *options], capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(f"{run}: {done.stderr.strip()}")
    log = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    if not keep:
        shutil.rmtree(run)
    return dict(val_loss=log[-1]["val_loss"], loss=log[-1]["loss"],
                tokens_per_second=statistics.median(line["tokens_per_second"] for line in log[2:]),
                memory=re.search(r"memory ([\d.]+ [GM]B)", done.stdout)[1])


def read(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def mean_and_interval(values: list[float]) -> str:
    """mean +- half the 95 % interval of the mean"""
    n, mean = len(values), f"{statistics.mean(values):.4f}"
    return f"{mean} +- {T_975[n] * statistics.stdev(values) / math.sqrt(n):.4f}" if n in T_975 else mean
