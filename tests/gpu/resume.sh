#!/usr/bin/env bash
# A run of 200 steps and the same one stopped after 60 and 120 and resumed twice give the same weights and moments, bit for bit: with
# accumulation, from the middle of an epoch and of a shard, each kernel launched by itself or all as one graph.
#   bash tests/gpu/resume.sh build/prism cuda        (or cpu)
set -eu
prism=$1 device=$2
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

cat >"$work/config.json" <<'EOF'
{"vocab_size": 258, "hidden_size": 64, "num_hidden_layers": 2, "num_heads": 2, "head_dim": 16, "intermediate_size": 128,
 "bos_token_id": 256, "eos_token_id": 257, "tie_word_embeddings": true, "mixers": ["prism", "prism-loop"], "rank": 3, "solver_dim": 8}
EOF
# 240 tokens a step: the data's 20,000 are an epoch of 84 steps, in shards of 3,001.
"$prism" tokenize README.md --limit-tokens 20000 --shard-tokens 3001 --val-fraction 0 --out "$work/set" >/dev/null

train() { "$prism" train --device "$device" --threads 1 "$@" >/dev/null; }
begin() { train --config "$work/config.json" --data "$work/set" --steps 200 --batch 2 --seq 60 --accumulate 2 --lr 3e-3 "$@"; }

dtypes=(f32) launches=("")
if [ "$device" = cuda ]; then dtypes=(f32 bf16) launches=("" --no-graph); fi
for dtype in "${dtypes[@]}"; do
  begin --dtype "$dtype" --out "$work/$dtype"
  for launch in "${launches[@]}"; do
    parts="$work/$dtype$launch-parts"
    begin --dtype "$dtype" $launch --stop-after 60 --out "$parts"
    train $launch --resume --stop-after 120 --out "$parts"
    train $launch --resume --out "$parts"
    for file in model.safetensors optimizer.safetensors; do
      cmp "$work/$dtype/$file" "$parts/$file" || { echo "resume: $device $dtype $launch: $file differs" >&2; exit 1; }
    done
  done
done
echo "resume: 200 steps equal 60 + 60 + 80 on $device, ${dtypes[*]}${launches[1]:+, as a graph and without}"
