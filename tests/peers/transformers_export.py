"""`prism export` as transformers runs it: the engine's logits, loss, ids and greedy text.

    python tests/peers/transformers_export.py --prism build/prism

Each model is trained for a few steps on this source tree, exported, and loaded with trust_remote_code. Needs
torch, transformers, sentencepiece, protobuf, no network. On the CPU on both sides; T = 131 crosses chunks.
"""
import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1")  # before transformers is there
import numpy
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

SIZE = dict(vocab_size=258, hidden_size=64, num_heads=2, head_dim=16, expand_v=2, intermediate_size=128,
            bos_token_id=256, eos_token_id=257, solver_dim=8, num_hidden_layers=2)
MODELS = {
    "prism": dict(mixers="prism", rank=3),
    "prism-loop": dict(mixers="prism-loop", rank=3, tie_word_embeddings=True),
    "gdn": dict(mixers="gdn"),
    "mixed": dict(mixers=["retnet", "prism", "prism-loop", "mamba2"], num_hidden_layers=4, rank=2),
    "attention": dict(mixers="attention", attention_heads=4),
    "hybrid": dict(mixers=["prism", "attention"], rank=3, use_gate=False),
    "ttt-mlp": dict(mixers=["ttt-mlp", "gdn"], expand_v=1),
    "mom": dict(mixers=["mom", "gla"]),
    "bypass": dict(mixers="prism", rank=2, solver_scale=True),
    "other choices": dict(mixers="prism", rank=3, solver_residual="anchor", solver_gain="gelu",
                          solver_key_norm=False, ablations=["no_retain", "shared_key"]),
}
B, T = 2, 131
TEXTS = ["The scan", "for (int64_t i = 0;", "\n\n  two  spaces, é, 中文, 1234567", "## What"]
failed = 0


def report(model: str, what: str, value: float, limit: float) -> None:
    global failed
    failed += not value <= limit
    print(f"{model:14} {what:44} {value:.1e} of {limit:.0e}  {'PASS' if value <= limit else 'FAIL'}", flush=True)


def run(*command: object) -> str:
    done = subprocess.run([str(part) for part in command], check=True, stdout=subprocess.PIPE, timeout=300)
    return done.stdout.decode(errors="replace")


def load(directory: Path) -> tuple:
    return (AutoModelForCausalLM.from_pretrained(directory, trust_remote_code=True).eval(),
            AutoTokenizer.from_pretrained(directory, trust_remote_code=True))


def relative(x: torch.Tensor, reference: torch.Tensor) -> float:
    return ((x - reference).norm() / reference.norm()).item()


@torch.no_grad()
def check(name: str, prism: Path, trained: Path, scratch: Path, shard: Path) -> None:
    run(prism, "export", "--model", trained, "--to", "hf", "--out", scratch / "f32")
    run(prism, "export", "--model", trained, "--to", "hf", "--out", scratch / "bf16", "--dtype", "bf16")
    for dtype in ("f32", "f64"):
        run(prism, "grad", "--model", trained, "--tokens", shard, "--batch", B, "--seq", T, "--dtype", dtype,
            "--device", "cpu", "--out", scratch / f"ours.{dtype}")
    ours, ours64 = (load_file(scratch / f"ours.{dtype}") for dtype in ("f32", "f64"))
    stream = torch.from_numpy(numpy.fromfile(shard, "<u2", B * T + 1, offset=1024).astype(numpy.int64))
    tokens = stream[:-1].view(B, T)
    model, tokenizer = load(scratch / "f32")
    out = model(input_ids=tokens, labels=tokens)
    report(name, "logits against prism grad", relative(out.logits, ours["logits"]), 1e-5)
    expected = F.cross_entropy(ours["logits"][:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    report(name, "loss of labels", abs(out.loss - expected).item() / expected.item(), 1e-4)
    twice = load(scratch / "f32")[0].double()(input_ids=tokens).logits
    report(name, "logits against prism grad, float64", relative(twice, ours64["logits"]), 1e-12)
    half = load(scratch / "bf16")[0](input_ids=tokens).logits.float()
    report(name, "logits of the bf16 export", relative(half, ours["logits"]), 3e-2)  # two layers' 8-bit mantissas

    # Padding on either side changes no real position.
    for side in ("left", "right"):
        tokenizer.padding_side = side
        batch = tokenizer(TEXTS, return_tensors="pt", padding=True)
        together = model(**batch).logits
        worst = 0.0
        for row, text in enumerate(TEXTS):
            alone = model(**tokenizer([text], return_tensors="pt")).logits[0]
            worst = max(worst, relative(together[row][batch["attention_mask"][row].bool()], alone))
        report(name, f"rows padded at the {side}", worst, 1e-5)

    # Ids and text are the engine's: it prints the prompt and what follows.
    tokenizer.padding_side = "left"
    batch = tokenizer(TEXTS, return_tensors="pt", padding=True)
    rows = model.generate(**batch, max_new_tokens=40, do_sample=False)
    different = 0
    for text, row in zip(TEXTS, rows):
        theirs = tokenizer.decode(row, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        here = run(prism, "generate", "--model", trained, "--prompt", text, "--tokens", 40, "--temperature", 0,
                   "--device", "cpu", "--dtype", "f32")
        different += here != theirs + "\n"
        if here != theirs + "\n":
            print(f"  prism        {here!r}\n  transformers {theirs!r}")
    report(name, "greedy texts that differ", different, 0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prism", type=Path, default=Path("build/prism"))
    prism = parser.parse_args().prism
    torch.set_num_threads(1)  # small products: threads cost more than they save
    disable_progress_bar()
    root = Path(__file__).resolve().parents[2]
    for name, choices in MODELS.items():
        with tempfile.TemporaryDirectory() as directory:
            scratch = Path(directory)
            data = [root / "README.md", root / "kernels"]
            pieces = name == "mixed"  # one of them with a SentencePiece tokenizer
            tokenizer = "byte"
            if pieces:
                tokenizer = scratch / "pieces.model"
                run(prism, "tokenize", "train", *data, "--vocab", 700, "--out", tokenizer)
            run(prism, "tokenize", *data, "--tokenizer", tokenizer, "--out", scratch / "set")
            config = SIZE | choices | (dict(vocab_size=700, bos_token_id=1, eos_token_id=2) if pieces else {})
            (scratch / "config.json").write_text(json.dumps(config))
            run(prism, "train", "--config", scratch / "config.json", "--data", scratch / "set", "--steps", 60,
                "--batch", 4, "--seq", 128, "--lr", 5e-3, "--eval-tokens", 1024, "--device", "cpu",
                "--out", scratch / "run")
            check(name, prism, scratch / "run", scratch, scratch / "set/train_000000.bin")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
