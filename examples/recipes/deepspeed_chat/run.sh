#!/usr/bin/env bash
# bash examples/recipes/deepspeed_chat/run.sh [arguments of step1_supervised_finetuning/main.py]
# needs: git clone https://github.com/deepspeedai/DeepSpeedExamples, here, or DEEPSPEED_EXAMPLES=the folder;
# pip install "transformers<5" "datasets<4.5" tensorboard; python examples/recipes/material.py
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
exec deepspeed --num_accelerators "${RANKS:-2}" --master_port "${MASTER_PORT:-29500}" \
    --module ds_layerwise.run "$here/train.py" --clone "${DEEPSPEED_EXAMPLES:-DeepSpeedExamples}" \
    --config "${CONFIG:-$here/ds.json}" --deepspeed --zero_stage 2 --dtype bf16 --data_split 1,0,0 \
    --model_name_or_path out/recipes/base --max_seq_len 64 --per_device_train_batch_size 8 "$@"
