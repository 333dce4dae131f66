#!/usr/bin/env bash
# bash examples/recipes/accelerate/run.sh placeholder|own [arguments of train.py]
# "own" keeps the script's torch.optim.AdamW: each rank steps on the whole parameters that it owns.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
kind=$1
shift
config=$here/ds.json
[ "$kind" = own ] && config=$here/ds_own.json
exec accelerate launch --num_machines 1 --num_processes "${RANKS:-2}" --main_process_port "${MASTER_PORT:-29500}" \
    --mixed_precision no --dynamo_backend no \
    --use_deepspeed --deepspeed_config_file "${CONFIG:-$config}" -m ds_layerwise.run \
    "$here/train.py" "$kind" --output_dir "out/recipes/accelerate_$kind" "$@"
