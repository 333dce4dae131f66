#!/usr/bin/env bash
# bash examples/recipes/diffusers/run.sh [arguments of train.py]      needs: pip install diffusers
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
exec accelerate launch --num_machines 1 --num_processes "${RANKS:-2}" --main_process_port "${MASTER_PORT:-29500}" \
    --mixed_precision no --dynamo_backend no \
    --use_deepspeed --deepspeed_config_file "${CONFIG:-$here/ds.json}" -m ds_layerwise.run \
    "$here/train.py" "$@"
