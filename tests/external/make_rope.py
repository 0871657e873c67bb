"""Makes tests/fixtures/rope/frequencies.json: inverse frequencies and attention factors of real models' RoPE settings.

    python make_rope.py OUT_FILE

Needs torch and transformers (5.24 was used). Each case is a config.json's RoPE part; `inv_freq` are the float32 numbers
of modeling_rope_utils at `seq_len` tokens.
"""

import json
import pathlib
import sys

import torch
from transformers import LlamaConfig, Phi3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

RAMP = [round(1.0 + 0.37 * i, 4) for i in range(48)]
CASES = {
    "llama-2": dict(head_dim=128, max_position_embeddings=4096, rope_theta=10000.0),
    "phi-2 sized head": dict(head_dim=80, max_position_embeddings=2048, rope_theta=10000.0),
    "llama-3.1": dict(
        head_dim=128,
        max_position_embeddings=131072,
        rope_theta=500000.0,
        rope_scaling=dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192),
    ),
    "qwen3 with yarn": dict(
        head_dim=128,
        max_position_embeddings=40960,
        rope_theta=1000000.0,
        rope_scaling=dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=32768),
    ),
    "yarn with mscale, untruncated": dict(
        head_dim=64,
        max_position_embeddings=163840,
        rope_theta=10000.0,
        rope_scaling=dict(rope_type="yarn", factor=40.0, original_max_position_embeddings=4096, beta_fast=32, beta_slow=1, mscale=1.0, mscale_all_dim=0.8, truncate=False),
    ),
    "linear": dict(head_dim=96, max_position_embeddings=16384, rope_theta=10000.0, rope_scaling=dict(rope_type="linear", factor=4.0)),
    "dynamic": dict(head_dim=128, max_position_embeddings=4096, rope_theta=10000.0, rope_scaling=dict(rope_type="dynamic", factor=2.0)),
    "phi-3 mini 128k": dict(
        model_type="phi3",
        head_dim=96,
        max_position_embeddings=131072,
        original_max_position_embeddings=4096,
        rope_theta=10000.0,
        rope_scaling=dict(rope_type="longrope", short_factor=[1.0 + x / 100 for x in RAMP], long_factor=RAMP),
    ),
}


def frequencies(case, seq_len):
    case = json.loads(json.dumps(case))
    heads = dict(hidden_size=4 * case.pop("head_dim"), num_attention_heads=4, num_key_value_heads=4)
    config = (Phi3Config if case.pop("model_type", "llama") == "phi3" else LlamaConfig)(**heads, **case)
    kind = config.rope_parameters["rope_type"]
    compute = ROPE_INIT_FUNCTIONS.get(kind, LlamaRotaryEmbedding.compute_default_rope_parameters)
    inv_freq, attention_factor = compute(config, device=torch.device("cpu"), seq_len=torch.tensor(seq_len))
    return dict(seq_len=seq_len, attention_factor=float(attention_factor), inv_freq=inv_freq.tolist())


def main():
    cases = []
    for name, case in CASES.items():
        for seq_len in (1024, 30000):
            cases.append(dict(name=name, config=case, **frequencies(case, seq_len)))
    path = pathlib.Path(sys.argv[1])
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("[\n" + ",\n".join(json.dumps(case) for case in cases) + "\n]\n")


if __name__ == "__main__":
    main()
