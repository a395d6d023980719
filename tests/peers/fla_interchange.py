"""Checkpoints to and from flash-linear-attention's GatedDeltaNetForCausalLM: the same files, the same logits.

    fla_interchange.py check --prism build/prism [--device cuda]    both ways, tied and untied
    fla_interchange.py logits MODEL --tokens SHARD --batch B --seq T [--dtype f32|bf16] --out FILE
    fla_interchange.py make DIR [--untied] [--seed N]               a small random model by save_pretrained

`logits` writes loss [] and logits [B,T,vocab] as `prism grad` does, for `prism diff`: row b starts at id b T
of the shard's first B T + 1. It loads strictly: a tensor that is missing or foreign there ends it.

Needs torch, transformers, einops, flash-linear-attention (0.6). Float32 goes through its recurrent kernel,
the exact one, since the chunked kernel multiplies in TF32; bf16 on a GPU goes through the chunked one.
Without a GPU Triton's interpreter runs the recurrent kernel in float32: slow, so rows are short.
"""
import argparse
import itertools
import json
import os
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy
import torch

GPU = torch.cuda.is_available()
if not GPU:
    os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported
    from triton.runtime.autotuner import Autotuner
    Autotuner._bench = lambda *_, **__: (1.0, 1.0, 1.0)  # nothing is timed: any configuration will do

from fla.models import GatedDeltaNetConfig, GatedDeltaNetForCausalLM  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402
from torch import Tensor  # noqa: E402

DEVICE = "cuda" if GPU else "cpu"
SMALL = dict(vocab_size=512, hidden_size=128, num_hidden_layers=2, num_heads=2, head_dim=64, expand_v=2,
             intermediate_size=256)
TOLERANCE = {"f32": 1e-4, "bf16": 1e-2}  # of the logits' relative error


def make(directory: Path, tied: bool, seed: int) -> None:
    torch.manual_seed(seed)
    config = GatedDeltaNetConfig(**SMALL, tie_word_embeddings=tied)
    GatedDeltaNetForCausalLM(config).save_pretrained(directory)


def load(directory: Path, dtype: str) -> GatedDeltaNetForCausalLM:
    model, info = GatedDeltaNetForCausalLM.from_pretrained(directory, dtype=torch.float32,
                                                           output_loading_info=True)
    wrong = {what: sorted(names) for what, names in info.items() if names}
    if wrong:
        sys.exit(f"{directory}: expected exactly the tensors of GatedDeltaNetForCausalLM, got {wrong}")
    for name, p in model.named_parameters():
        if dtype == "bf16" and not name.endswith(("A_log", "dt_bias")):  # the engine keeps these in float32
            p.data = p.data.bfloat16()
    for layer in model.model.layers:
        layer.attn.mode = "chunk" if dtype == "bf16" and GPU else "fused_recurrent"
    return model.to(DEVICE).eval()


@torch.no_grad()
def logits(directory: Path, stream: Tensor, batch: int, seq: int, dtype: str) -> dict[str, Tensor]:
    tokens, targets = stream[:-1].view(batch, seq), stream[1:].view(batch, seq)
    out = load(directory, dtype)(input_ids=tokens.to(DEVICE), use_cache=False).logits.float().cpu()
    return dict(loss=torch.nn.functional.cross_entropy(out.flatten(0, 1), targets.flatten()), logits=out)


def read_shard(path: Path, count: int) -> Tensor:
    """The first ids of a shard in llm.c's format: 256 int32 of header, then uint16 or uint32 ids."""
    magic = struct.unpack("<i", path.read_bytes()[:4])[0]
    width = {20240520: "<u2", 20240801: "<u4"}[magic]
    return torch.from_numpy(numpy.fromfile(path, width, count, offset=1024).astype(numpy.int64))


def write_shard(path: Path, ids: Tensor) -> None:
    header = numpy.zeros(256, "<i4")
    header[:3] = 20240520, 1, len(ids)
    path.write_bytes(header.tobytes() + ids.numpy().astype("<u2").tobytes())


def difference(prism: Path, device: str, dtype: str, model: Path, stream: Tensor,
               shape: tuple[int, int]) -> float:
    """Relative error of the engine's logits against FLA's, for the same directory and ids."""
    shard, ours = model.parent / "ids.bin", model.parent / "ours.safetensors"
    write_shard(shard, stream)
    run(prism, "grad", "--model", model, "--tokens", shard, "--batch", shape[0], "--seq", shape[1],
        "--dtype", dtype, "--device", device, "--out", ours)
    theirs = logits(model, stream, *shape, dtype)["logits"]
    return ((load_file(ours)["logits"] - theirs).norm() / theirs.norm()).item()


def run(*command: object) -> None:
    subprocess.run([str(part) for part in command], check=True, stdout=subprocess.DEVNULL)


def check(prism: Path, device: str) -> int:
    batch, seq = 2, 256 if GPU else 12
    torch.manual_seed(0)
    stream = torch.randint(SMALL["vocab_size"], (batch * seq + 1,))
    failed = 0
    for tied, origin in itertools.product((True, False), ("prism", "fla")):
        with tempfile.TemporaryDirectory() as scratch:
            model = Path(scratch) / "model"
            if origin == "fla":
                make(model, tied, seed=1)
            else:
                config = Path(scratch) / "config.json"
                config.write_text(json.dumps(SMALL | dict(tie_word_embeddings=tied)))
                run(prism, "init", "--config", config, "--seed", 1, "--out", model)
            for dtype in TOLERANCE if device == "cuda" else ("f32",):
                error = difference(prism, device, dtype, model, stream, (batch, seq))
                passed = error <= TOLERANCE[dtype]
                failed += not passed
                print(f"made by {origin:5}  {'tied' if tied else 'untied':6}  {dtype:4}  logits differ by "
                      f"{error:.1e} of {TOLERANCE[dtype]:.0e}  {'PASS' if passed else 'FAIL'}", flush=True)
    return 1 if failed else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("check")
    one.add_argument("--prism", type=Path, default=Path("build/prism"))
    one.add_argument("--device", choices=["cpu", "cuda"], default=DEVICE)
    one = commands.add_parser("logits")
    one.add_argument("model", type=Path)
    one.add_argument("--tokens", type=Path, required=True)
    one.add_argument("--batch", type=int, required=True)
    one.add_argument("--seq", type=int, required=True)
    one.add_argument("--dtype", choices=list(TOLERANCE), default="f32")
    one.add_argument("--out", type=Path, required=True)
    one = commands.add_parser("make")
    one.add_argument("directory", type=Path)
    one.add_argument("--untied", action="store_true")
    one.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.command == "check":
        return check(args.prism, args.device)
    if args.command == "make":
        make(args.directory, not args.untied, args.seed)
    else:
        stream = read_shard(args.tokens, args.batch * args.seq + 1)
        save_file(logits(args.model, stream, args.batch, args.seq, args.dtype), args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
