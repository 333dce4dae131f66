#!/usr/bin/env bash
# bash examples/recipes/deepspeed_examples/run.sh [arguments of cifar10_deepspeed.py]
# needs: git clone https://github.com/deepspeedai/DeepSpeedExamples, here, or DEEPSPEED_EXAMPLES=the folder
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
exec deepspeed --num_accelerators "${RANKS:-2}" --master_port "${MASTER_PORT:-29500}" \
    --module ds_layerwise.run "$here/train.py" --clone "${DEEPSPEED_EXAMPLES:-DeepSpeedExamples}" \
    --config "${CONFIG:-$here/ds.json}" --deepspeed --stage 1 --dtype fp32 --epochs 1 "$@"
