#!/usr/bin/env bash
# bash examples/recipes/ms_swift/run.sh [arguments of swift sft]      needs: pip install ms-swift
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
exec deepspeed --module ds_layerwise.run -m swift.cli.sft --deepspeed "$here/ds.json" \
    --model Qwen/Qwen3-0.6B --dataset AI-ModelScope/alpaca-gpt4-data-en --tuner_type full \
    --torch_dtype bfloat16 --num_train_epochs 1 --per_device_train_batch_size 2 \
    --gradient_accumulation_steps 8 --learning_rate 1e-5 --warmup_ratio 0.05 --max_length 2048 \
    --output_dir out/ms_swift "$@"
