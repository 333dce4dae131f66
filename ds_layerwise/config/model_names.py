"""The names that model families give to projections and to the sizes of attention."""

from __future__ import annotations

import re

#: The layers of queries, and of keys and values, whose heads can become separate matrices.
QUERY_NAMES = ("q_proj", "query", "wq", "q_b_proj", "kv_b_proj", "q_attn")
KEY_VALUE_NAMES = ("k_proj", "v_proj", "key", "value", "wk", "wv")

#: The layers of queries, keys and values together, with heads of one width.
FUSED_NAMES = (
    "c_attn",
    "qkv",
    "qkv_proj",
    "query_key_value",
    "Wqkv",
    "wqkv",
    "att_proj",
    "in_proj_weight",
)

#: The layers of queries, keys and values, in all families of transformers or in one.
QKV = (
    "qkv",
    "bark.att_proj",
    "bloom.query_key_value",
    "dbrx.Wqkv",
    "deberta.in_proj",
    "decision_transformer.c_attn",
    "falcon.query_key_value",
    "gpt2.c_attn",
    "gpt_bigcode.c_attn",
    "gpt_neox.query_key_value",
    "gpt_neox_japanese.query_key_value",
    "imagegpt.c_attn",
    "modernbert.Wqkv",
    "mpt.Wqkv",
    "openai.c_attn",
    "persimmon.query_key_value",
    "phi3.qkv_proj",
    "phi4_multimodal.qkv_proj",
)

#: The families in which :data:`QKV` is grouped by key head, each with its queries. In others, all
#: queries come first.
QKV_BY_HEAD = (
    "bloom",
    "deberta",
    "falcon",
    "gpt_bigcode",
    "gpt_neox",
    "gpt_neox_japanese",
    "persimmon",
)

#: The layers of gate and up, or keys and values: two parts of one size, one after the other.
HALVES = (
    "gate_up_proj",
    "Wi",
    "to_kv",
    "granitemoe_swa.input_linear",
    "granitemoehybrid.input_linear",
    "granitemoeshared.input_linear",
    "jetmoe.input_linear",
    "jetmoe.kv_proj",
)

#: The families of experts with such a layout whose module does not declare it.
GATE_UP_EXPERTS = ("llama4", "longcat_flash", "step3p7")

#: The families in which a gate follows each head of queries.
GATED_QUERIES = ("qwen3_5", "qwen3_5_moe", "qwen3_next", "qwen4_exp")

#: The names of fused projections, known or not.
LOOKS_FUSED = re.compile(
    r"(\w+_)?w?qkvz?(_proj)?|Wqkv|query_key_value|c_attn|att_proj|(to_|linear_)?kv|"
    r"in_proj_(weight|ba)|gate_up(_proj)?|Wi|w1[23]"
)

#: The names of the number of query heads, of the number of key heads, of the width of a head, and
#: of the width of a hidden state.
HEAD_COUNTS = ("num_attention_heads", "n_head", "num_heads", "n_heads")
KEY_HEAD_COUNTS = ("num_key_value_heads", "num_kv_heads", "kv_heads")
HEAD_WIDTHS = ("head_dim", "attention_head_size")
HIDDEN_WIDTHS = ("hidden_size", "n_embd", "d_model", "dim")

#: The names of the sizes of latent attention.
LATENT_SIZES = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")

#: The names, in linear attention, of the numbers of key heads and value heads, and of the total
#: width of each.
LINEAR_SIZES = ("num_k_heads", "num_v_heads", "key_dim", "value_dim")
