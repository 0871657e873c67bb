"""Makes tests/fixtures/tiny: small random models of every family, and what transformers computes on them.

    python make_tiny.py OUT_DIR [NAME ...]

Needs torch and transformers (5.24 was used). One folder a variant: config.json (in the form the variant wants, old or
new), model.safetensors, golden.safetensors. The numbers are computed from the files as written, reloaded and widened to
float32, on CPU with SDPA and without a KV cache. See tests/fixtures/tiny/README.md for the tensors.
"""

import json
import pathlib
import shutil
import sys
import zlib

import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

SHORT, LONG = 12, 40
SHAPE = dict(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=40,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=0,
)
LONG_FACTORS = dict(short_factor=[1.0, 1.1, 1.3, 1.7], long_factor=[1.5, 2.0, 3.5, 5.0])


def llama(**changes):
    return "LlamaForCausalLM", transformers.LlamaConfig(**{**SHAPE, "rope_theta": 1e4, **changes})


def scaled(rope_type, **parameters):
    return {"rope_type": rope_type, "rope_theta": 100.0, **parameters}


def gemma3_text(**changes):
    shape = {
        **SHAPE,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "intermediate_size": 32,
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "query_pre_attn_scalar": 24,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
            "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1000.0},
        },
    }
    return transformers.Gemma3TextConfig(**{**shape, **changes})


def gemma2():
    shape = {**SHAPE, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "sliding_window": 8}
    caps = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0, "query_pre_attn_scalar": 9}
    return "Gemma2ForCausalLM", transformers.Gemma2Config(**{**shape, **caps})


def gemma3_wrapper():
    vision = dict(
        model_type="siglip_vision_model",
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        image_size=8,
        patch_size=4,
    )
    config = transformers.Gemma3Config(
        text_config=gemma3_text(num_hidden_layers=2, layer_types=["sliding_attention", "full_attention"]).to_dict(),
        vision_config=vision,
        mm_tokens_per_image=4,
        boi_token_index=60,
        eoi_token_index=61,
        image_token_index=62,
    )
    return "Gemma3ForConditionalGeneration", config


def qwen2(**changes):
    return "Qwen2ForCausalLM", transformers.Qwen2Config(**{**SHAPE, "intermediate_size": 24, "tie_word_embeddings": True, **changes})


def phi3(**changes):
    shape = {**SHAPE, "partial_rotary_factor": 0.5, "hidden_size": 48, "intermediate_size": 24, "num_attention_heads": 3, "num_key_value_heads": 1}
    return "Phi3ForCausalLM", transformers.Phi3Config(**{**shape, **changes})


def smollm3():
    config = transformers.SmolLM3Config(**SHAPE, no_rope_layers=[1, 0], rope_theta=1e4)
    return "SmolLM3ForCausalLM", config


def old_scaling(config, drop=()):
    """The form of transformers 4: rope_theta and rope_scaling beside each other, the type under `type`."""
    parameters = config.pop("rope_parameters")
    config["rope_theta"] = parameters.pop("rope_theta")
    config["partial_rotary_factor"] = parameters.pop("partial_rotary_factor", None)
    parameters["type"] = parameters.pop("rope_type")
    config["rope_scaling"] = None if parameters["type"] == "default" else parameters
    for key in (*drop, *[key for key, value in config.items() if key == "partial_rotary_factor" and value is None]):
        config.pop(key)
    return config


def old_gemma3(config):
    parameters = config.pop("rope_parameters")
    config["rope_theta"] = parameters["full_attention"]["rope_theta"]
    config["rope_local_base_freq"] = parameters["sliding_attention"]["rope_theta"]
    config["rope_scaling"] = {"rope_type": "linear", "factor": parameters["full_attention"]["factor"]}
    config.pop("layer_types")
    config["sliding_window_pattern"] = 2
    return config


def same(config):
    return config


BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
# name: (class and config, dtype of the file, how config.json is rewritten)
VARIANTS = {
    "llama-gqa": (lambda: llama(), BF16, same),
    "llama-bias": (lambda: llama(attention_bias=True, mlp_bias=True, head_dim=12), F16, old_scaling),
    "llama-mha": (lambda: llama(num_key_value_heads=4), BF16, lambda c: old_scaling(c, ["num_key_value_heads", "head_dim"])),
    "llama-mqa": (lambda: llama(hidden_size=24, num_attention_heads=6, num_key_value_heads=1, head_dim=8), BF16, same),
    "llama3-scaling": (
        lambda: llama(rope_parameters=scaled("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32)),
        BF16,
        old_scaling,
    ),
    "llama-linear": (lambda: llama(rope_parameters=scaled("linear", factor=4.0)), BF16, old_scaling),
    "llama-dynamic": (lambda: llama(max_position_embeddings=16, rope_parameters=scaled("dynamic", factor=3.0)), BF16, same),
    "llama-yarn": (
        lambda: llama(head_dim=16, num_attention_heads=2, num_key_value_heads=1, rope_parameters=scaled("yarn", factor=4.0, original_max_position_embeddings=16, beta_fast=0.8, beta_slow=0.1)),
        BF16,
        old_scaling,
    ),
    "llama-yarn-constants": (
        lambda: llama(head_dim=16, num_attention_heads=2, num_key_value_heads=1, rope_parameters=scaled("yarn", factor=4.0, original_max_position_embeddings=16, beta_fast=1.0, beta_slow=0.2, mscale=1.2, mscale_all_dim=0.7, truncate=False)),
        BF16,
        same,
    ),
    "smollm3": (smollm3, BF16, same),
    "mistral-sliding": (
        lambda: ("MistralForCausalLM", transformers.MistralConfig(**SHAPE, sliding_window=8)),
        BF16,
        old_scaling,
    ),
    "qwen2": (lambda: qwen2(), F32, old_scaling),
    "qwen2-sliding": (lambda: qwen2(use_sliding_window=True, sliding_window=8, max_window_layers=1), BF16, same),
    "qwen3": (lambda: ("Qwen3ForCausalLM", transformers.Qwen3Config(**SHAPE, head_dim=12)), BF16, same),
    "gemma2": (gemma2, BF16, old_scaling),
    "gemma3": (lambda: ("Gemma3ForCausalLM", gemma3_text()), BF16, same),
    "gemma3-old-config": (lambda: ("Gemma3ForCausalLM", gemma3_text()), BF16, old_gemma3),
    "gemma3-wrapper": (gemma3_wrapper, BF16, same),
    "phi3": (lambda: phi3(sliding_window=8), BF16, old_scaling),
    "phi3-longrope": (
        lambda: phi3(original_max_position_embeddings=16, rope_parameters=scaled("longrope", partial_rotary_factor=0.5, original_max_position_embeddings=16, **LONG_FACTORS)),
        BF16,
        same,
    ),
    "olmo2": (lambda: ("Olmo2ForCausalLM", transformers.Olmo2Config(**SHAPE)), BF16, same),
}


@torch.no_grad()
def randomize(model, seed):
    """Weights spread enough that attention and logits are far from uniform; norms and biases random, so that they matter."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in sorted(model.named_parameters()):
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.dim() == 1 and "norm" in name:
            centre = 0.0 if "gemma" in type(model).__name__.lower() else 1.0
            parameter.copy_(centre + 0.3 * noise)
        elif parameter.dim() == 1:
            parameter.copy_(0.3 * noise)
        else:
            parameter.copy_(noise * 1.2 / parameter.shape[-1] ** 0.5)


def run(folder, ids):
    """Logits [T, V] and {layer: (q, k, v)}, each [heads, T, d], of a freshly loaded model."""
    # SDPA has no softcap, so transformers runs Gemma 2 eagerly.
    implementation = "eager" if folder.name == "gemma2" else "sdpa"
    auto = transformers.AutoModelForImageTextToText if "wrapper" in folder.name else transformers.AutoModelForCausalLM
    model = auto.from_pretrained(folder, dtype=torch.float32, attn_implementation=implementation).eval()
    eager = getattr(sys.modules[type(model).__module__], "eager_attention_forward")
    original = ALL_ATTENTION_FUNCTIONS.get(implementation, eager)
    captured = {}

    def capture(module, query, key, value, *args, **kwargs):
        captured[module.layer_idx] = (query[0], key[0], value[0])
        return original(module, query, key, value, *args, **kwargs)

    ALL_ATTENTION_FUNCTIONS[implementation] = capture
    try:
        with torch.no_grad():
            logits = model(input_ids=ids[None], use_cache=False).logits[0]
    finally:
        ALL_ATTENTION_FUNCTIONS[implementation] = original
    return logits, captured


def packed_gram(x, n_groups):
    """Sum over positions and the group's heads of x xᵀ in f64; lower triangles, [n_groups, d(d+1)/2]."""
    heads, _, d = x.shape
    x = x.double().reshape(n_groups, -1, d) if heads != n_groups else x.double()
    gram = x.transpose(1, 2) @ x
    rows, cols = torch.tril_indices(d, d)
    return gram[:, rows, cols].float().contiguous()


def golden(folder, seed):
    generator = torch.Generator().manual_seed(seed + 1)
    tensors = {}
    for name, n_tokens in (("short", SHORT), ("long", LONG)):
        ids = torch.randint(3, 60, (n_tokens,), generator=generator)
        logits, captured = run(folder, ids)
        nll = torch.nn.functional.cross_entropy(logits[:-1].double(), ids[1:], reduction="none")
        tensors[f"{name}.input_ids"] = ids
        tensors[f"{name}.nll"] = nll
        tensors[f"{name}.last_logits"] = logits[-1].contiguous()
        for layer, (q, k, v) in captured.items():
            n_kv = k.shape[0]
            tensors[f"{name}.layers.{layer}.gram_q"] = packed_gram(q, n_kv)
            tensors[f"{name}.layers.{layer}.gram_k"] = packed_gram(k, n_kv)
            tensors[f"{name}.layers.{layer}.gram_v"] = packed_gram(v, n_kv)
    save_file(tensors, folder / "golden.safetensors")


def make(name, out, seed):
    (architecture, config), dtype, rewrite = VARIANTS[name][0](), VARIANTS[name][1], VARIANTS[name][2]
    model = getattr(transformers, architecture)(config)
    randomize(model, seed)
    folder = out / name
    shutil.rmtree(folder, ignore_errors=True)
    model.to(dtype).save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    written = json.loads((folder / "config.json").read_text())
    for key in ("transformers_version", "_name_or_path"):
        written.pop(key, None)
    (folder / "config.json").write_text(json.dumps(rewrite(written), indent=2, sort_keys=True) + "\n")
    golden(folder, seed)
    names = sorted(load_file(folder / "model.safetensors"))
    sizes = {path.name: path.stat().st_size for path in sorted(folder.iterdir())}
    print(name, sizes, names[0], len(names))


def main():
    torch.set_num_threads(1)
    out = pathlib.Path(sys.argv[1])
    for name in VARIANTS:
        if not sys.argv[2:] or name in sys.argv[2:]:
            make(name, out, zlib.crc32(name.encode()))


if __name__ == "__main__":
    main()
