//! One case a file of `tests/fixtures/families`: configuration and tensor shapes → spec facts or a refusal.
//! And `docs/families.md`, which is made from the registries.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};
use wush_checkpoint::Checkpoint;
use wush_format::tensor_file::{Dtype, NewTensor, write_tensor_file};
use wush_model::arch::refuse::{Ground, HAZARDS, Sign};
use wush_model::arch::{self, FAMILIES, RopeScaling, WRAPPERS};
use wush_model::rope::Frequencies;
use wush_model::spec::ModelSpec;

fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn cases() -> BTreeMap<String, Value> {
    let entries = std::fs::read_dir(repository().join("tests/fixtures/families")).expect("fixtures");
    let paths = entries.map(|entry| entry.expect("entry").path());
    paths
        .filter(|path| path.extension().is_some_and(|extension| extension == "json"))
        .map(|path| {
            let name = path.file_stem().expect("a stem").to_string_lossy().into_owned();
            let text = std::fs::read_to_string(&path).expect("readable");
            (name, serde_json::from_str(&text).unwrap_or_else(|e| panic!("{}: {e}", path.display())))
        })
        .collect()
}

/// Shapes of a checkpoint, from its configuration and the layout flags; an independent retelling of the families.
struct Layout<'a> {
    config: &'a Value,
    flags: Vec<&'a str>,
    shapes: BTreeMap<String, Vec<usize>>,
}

impl<'a> Layout<'a> {
    fn of(case: &'a Value) -> BTreeMap<String, Vec<usize>> {
        let config = case["config"].get("text_config").unwrap_or(&case["config"]);
        let flags = case["layout"].as_array().expect("layout").iter().map(|flag| flag.as_str().expect("a flag"));
        let mut layout = Self { config, flags: flags.collect(), shapes: BTreeMap::new() };
        layout.build();
        for (name, shape) in case.get("tensors").and_then(Value::as_object).into_iter().flatten() {
            match shape.as_array() {
                None => drop(layout.shapes.remove(name)),
                Some(shape) => {
                    let shape = shape.iter().map(|n| n.as_u64().expect("a length") as usize).collect();
                    layout.shapes.insert(name.clone(), shape);
                }
            }
        }
        layout.shapes
    }

    fn has(&self, flag: &str) -> bool {
        self.flags.contains(&flag)
    }

    fn option(&self, key: &str) -> Option<&'a str> {
        self.flags.iter().find_map(|flag| flag.strip_prefix(key))
    }

    fn count(&self, key: &str, default: usize) -> usize {
        self.config[key].as_u64().map_or(default, |n| n as usize)
    }

    fn put(&mut self, name: String, shape: &[usize]) {
        self.shapes.insert(name, shape.to_vec());
    }

    fn build(&mut self) {
        let prefix = self.option("prefix:").unwrap_or("model.");
        let (hidden, vocab) = (self.count("hidden_size", 16), self.count("vocab_size", 32));
        self.put(format!("{prefix}embed_tokens.weight"), &[vocab, hidden]);
        self.put(format!("{prefix}norm.weight"), &[hidden]);
        if let Some(name) = self.option("head:") {
            self.put(name.to_owned(), &[vocab, hidden]);
        }
        for layer in 0..self.count("num_hidden_layers", 2).min(4) {
            self.layer(&format!("{prefix}layers.{layer}"), hidden);
        }
    }

    fn layer(&mut self, layer: &str, hidden: usize) {
        // Gemma's files leave 8 and 4 heads out.
        let heads = self.count("num_attention_heads", 8);
        let kv_heads = self.count("num_key_value_heads", if heads == 8 { 4 } else { heads });
        let d = self.count("head_dim", hidden / heads);
        let (q, kv, wide) = (heads * d, kv_heads * d, self.count("intermediate_size", 24));
        let norms: &[&str] = match (self.has("gemma_norms"), self.has("post_norms")) {
            (true, _) => &["input", "post_attention", "pre_feedforward", "post_feedforward"],
            (_, true) => &["post_attention", "post_feedforward"],
            _ => &["input", "post_attention"],
        };
        for norm in norms {
            self.put(format!("{layer}.{norm}_layernorm.weight"), &[hidden]);
        }
        let qkv_bias = self.has("qkv_bias");
        let mut linears =
            vec![("mlp.down_proj", hidden, wide, false), ("self_attn.o_proj", hidden, q, self.has("o_bias"))];
        if self.has("fused") {
            linears.push(("self_attn.qkv_proj", q + 2 * kv, hidden, false));
            linears.push(("mlp.gate_up_proj", 2 * wide, hidden, false));
        } else {
            for (name, rows) in [("self_attn.q_proj", q), ("self_attn.k_proj", kv), ("self_attn.v_proj", kv)] {
                linears.push((name, rows, hidden, qkv_bias));
            }
            linears.push(("mlp.gate_proj", wide, hidden, false));
            linears.push(("mlp.up_proj", wide, hidden, false));
        }
        for (name, rows, cols, bias) in linears {
            self.put(format!("{layer}.{name}.weight"), &[rows, cols]);
            if bias {
                self.put(format!("{layer}.{name}.bias"), &[rows]);
            }
        }
        for (name, full) in [("q", q), ("k", kv)] {
            if self.has("head_norms") || self.has("full_norms") {
                let width = if self.has("full_norms") { full } else { d };
                self.put(format!("{layer}.self_attn.{name}_norm.weight"), &[width]);
            }
        }
    }
}

/// Writes the checkpoint and resolves it; any error as its message and hint.
fn resolve(case: &Value, scaling: Option<&RopeScaling>) -> Result<ModelSpec, (String, Option<String>)> {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let zeros = |shape: Vec<usize>| {
        let bytes = vec![0; 2 * shape.iter().product::<usize>()];
        NewTensor { dtype: Dtype::BF16, shape, bytes }
    };
    let tensors = Layout::of(case).into_iter().map(|(name, shape)| (name, zeros(shape))).collect();
    write_tensor_file(&dir.path().join("model.safetensors"), &tensors, &BTreeMap::new()).expect("written");
    std::fs::write(dir.path().join("config.json"), case["config"].to_string()).expect("written");
    let ckpt = Checkpoint::open(dir.path()).map_err(|e| (e.to_string(), e.hint()))?;
    arch::resolve(&ckpt, scaling).map_err(|e| (e.to_string(), e.hint()))
}

/// A fact of the spec, under its name in the fixtures.
fn fact(spec: &ModelSpec, key: &str) -> Value {
    let attn = &spec.layers[0].attn;
    let rope = attn.rope.as_ref();
    match key {
        "family" => json!(spec.family),
        "n_layers" => json!(spec.layers.len()),
        "n_kv_heads" => json!(attn.n_kv_heads),
        "head_dim" => json!(attn.head_dim),
        "rotary_dim" => json!(rope.map(|rope| rope.rotary_dim)),
        "attention_factor" => json!(rope.map(|rope| f64::from(rope.attention_factor))),
        "value_bias" => json!(attn.v.bias.is_some()),
        "value_rows" => json!([attn.v.weight.rows.start, attn.v.weight.rows.end]),
        "softcap" => json!(attn.logit_softcap),
        "final_softcap" => json!(spec.final_logit_softcap),
        "windows" => spec.layers.iter().map(|layer| json!(layer.attn.window)).collect(),
        "rope_layers" => spec.layers.iter().map(|layer| json!(layer.attn.rope.is_some())).collect(),
        "tied" => json!(spec.lm_head.name == spec.embedding.name),
        _ => panic!("no such fact: {key}"),
    }
}

fn same(found: &Value, expected: &Value) -> bool {
    match (found.as_f64(), expected.as_f64()) {
        // Attention factors are f32 in the spec: half an ulp of 1.
        (Some(found), Some(expected)) => (found - expected).abs() <= f64::from(f32::EPSILON),
        _ => found == expected,
    }
}

#[test]
fn every_case_has_its_outcome() {
    let mut wrong = String::new();
    for (name, case) in cases() {
        let outcome = case["outcome"].as_object().expect("an outcome");
        match (resolve(&case, None), outcome.get("refused").and_then(Value::as_str)) {
            (Err((message, _)), Some(part)) if message.contains(part) => {}
            (Err((message, _)), _) => writeln!(wrong, "{name}: {message}").expect("a String takes all"),
            (Ok(spec), Some(_)) => writeln!(wrong, "{name}: accepted as {}", spec.family).expect("a String takes all"),
            (Ok(spec), None) => {
                for (key, expected) in outcome {
                    let found = fact(&spec, key);
                    if !same(&found, expected) {
                        writeln!(wrong, "{name}: {key}: expected {expected}, found {found}")
                            .expect("a String takes all");
                    }
                }
            }
        }
    }
    assert!(wrong.is_empty(), "\n{wrong}");
}

#[test]
fn every_refusal_of_a_hazard_says_why_and_what_to_do() {
    let cases = cases();
    for hazard in HAZARDS {
        let shows =
            |case: &&Value| case["outcome"]["refused"].as_str().is_some_and(|part| part.starts_with(hazard.name));
        // Quantized weights are refused earlier, when the checkpoint is opened.
        let Some(case) = cases.values().find(shows) else {
            assert_eq!(hazard.name, "Quantized weights", "hazard without a case");
            continue;
        };
        let (message, hint) = resolve(case, None).expect_err("a hazard");
        assert!(message.ends_with(hazard.why), "{message}");
        assert_eq!(hint.as_deref(), Some(hazard.way_out));
    }
}

#[test]
fn rope_scaling_can_be_asked_for_on_a_checkpoint_without_one() {
    let cases = cases();
    let yarn: RopeScaling = "yarn:4".parse().expect("valid");
    assert_eq!(yarn.to_string(), "yarn:4");
    let plain = resolve(&cases["gqa"], None).expect("accepted");
    let scaled = resolve(&cases["gqa"], Some(&yarn)).expect("accepted");
    assert_eq!((plain.max_position_embeddings, scaled.max_position_embeddings), (64, 256));
    // The same numbers as a configuration that says yarn:4 over the same original length.
    let mut config = cases["gqa"].clone();
    config["config"]["rope_scaling"] = json!({ "type": "yarn", "factor": 4.0 });
    let configured = resolve(&config, None).expect("accepted");
    assert_eq!(scaled.layers[0].attn.rope, configured.layers[0].attn.rope);
    assert_ne!(scaled.layers[0].attn.rope, plain.layers[0].attn.rope);
    let again = resolve(&config, Some(&yarn)).expect("the same scaling is no conflict");
    assert_eq!(again.layers, configured.layers);
    let (message, _) = resolve(&cases["rope-linear"], Some(&yarn)).expect_err("another scaling");
    assert!(message.contains("its own scaling of type \"linear\""), "{message}");
}

#[test]
fn rope_scaling_that_cannot_be_read_is_refused() {
    for text in ["", "yarn", "yarn:", "yarn:0.5", "yarn:nan", "yarn:inf", "YARN:4", "llama3:8", "linear:1e9"] {
        let error = text.parse::<RopeScaling>().expect_err(text);
        assert!(error.to_string().contains("expected yarn:FACTOR"), "{error}");
    }
}

#[test]
fn gemma_scales_only_the_full_layers_when_asked() {
    let linear: RopeScaling = "linear:2".parse().expect("valid");
    let case = &cases()["sliding-pattern-gemma3"];
    let (plain, scaled) = (resolve(case, None).expect("accepted"), resolve(case, Some(&linear)).expect("accepted"));
    assert_eq!(plain.layers[0], scaled.layers[0], "sliding");
    let frequencies = |spec: &ModelSpec| match &spec.layers[1].attn.rope.as_ref().expect("turns").frequencies {
        Frequencies::Fixed(inv_freq) => inv_freq.clone(),
        other => panic!("{other:?}"),
    };
    let halves: Vec<f32> = frequencies(&plain).iter().map(|omega| omega / 2.0).collect();
    assert_eq!(frequencies(&scaled), halves, "full");
}

#[test]
fn names_in_the_registries_are_unique() {
    let mut seen = BTreeSet::new();
    for name in arch::supported_model_types() {
        assert!(seen.insert(name), "{name} twice");
    }
    let names: BTreeSet<_> = HAZARDS.iter().map(|hazard| hazard.name).collect();
    assert_eq!(names.len(), HAZARDS.len());
}

/// `docs/families.md`, from the registries.
fn families_page() -> String {
    let mut page = String::from(
        "# Model families\n\n\
         Made from the registries in `crates/wush-model/src/arch`; a test fails when this page and they differ\n\
         (`WUSH_WRITE_DOCS=1 cargo test -p wush-model --test families` writes it).\n\n\
         ## Supported\n\n\
         | family | `model_type` | models, and what is particular |\n| --- | --- | --- |\n",
    );
    let types = |values: &[&str]| values.iter().map(|value| format!("`{value}`")).collect::<Vec<_>>().join(", ");
    for family in FAMILIES {
        let row = format!("| {} | {} | {} |\n", family.name, types(family.model_types), family.docs);
        page.push_str(&row);
    }
    page.push_str(
        "\nA decoder inside one of these wrappers (its configuration under `text_config`) is found too, and the other\n\
         towers are copied untouched:\n\n| `model_type` | wraps |\n| --- | --- |\n",
    );
    for wrapper in WRAPPERS {
        page.push_str(&format!("| `{}` | {} |\n", wrapper.model_type, wrapper.docs));
    }
    page.push_str(
        "\nRoPE scalings: default, linear, dynamic, llama3, YaRN, longrope, from `rope_scaling` or `rope_parameters`;\n\
         `--rope-scaling yarn:4` (or `linear:…`, `dynamic:…`) for a checkpoint without one.\n\
         `generate` ends a text where dynamic and longrope scaling would turn all keys otherwise, those that are \
         cached already too; it says so before.\n\
         Layers beyond `num_hidden_layers` (draft heads) are copied untouched.\n",
    );
    for (ground, title) in [
        (Ground::NotExact, "Refused: folding would change the model"),
        (Ground::NotBuilt, "Refused: would be exact, but is not built"),
        (Ground::Form, "Refused: not in a form that can be converted"),
    ] {
        page.push_str(&format!("\n## {title}\n\n| what | seen by | why | way out |\n| --- | --- | --- | --- |\n"));
        for hazard in HAZARDS.iter().filter(|hazard| hazard.ground == ground) {
            let signs = hazard.signs.iter().map(Sign::describe).collect::<Vec<_>>().join("; ");
            page.push_str(&format!("| {} | {signs} | {} | {} |\n", hazard.name, hazard.why, hazard.way_out));
        }
    }
    page.push_str(
        "\nAlso refused: a `model_type` that is not listed; a known one under an unknown class name in `architectures`; any\n\
         tensor of a decoder layer that the family does not read (stored `rotary_emb` buffers are harmless); a tensor of\n\
         another shape or dtype than its role demands.\n",
    );
    page
}

#[test]
fn the_families_page_is_what_the_registries_say() {
    let path = repository().join("docs/families.md");
    let page = families_page();
    if std::env::var_os("WUSH_WRITE_DOCS").is_some() {
        std::fs::create_dir_all(path.parent().expect("in docs")).expect("a directory");
        std::fs::write(&path, &page).expect("written");
    }
    let written = std::fs::read_to_string(&path).unwrap_or_default();
    assert!(written == page, "docs/families.md differs; write it again with WUSH_WRITE_DOCS=1");
}
