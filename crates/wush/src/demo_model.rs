//! The demonstration model and its text, inside the program so that `wush demo` works wherever it is installed.

macro_rules! files {
    ($($name:literal),* $(,)?) => {
        &[$(($name, include_bytes!(concat!("../../../tests/fixtures/demo-model/", $name)))),*]
    };
}

/// Name and content of every file; `tests/fixtures/demo-model/README.md` says where they come from.
pub const FILES: &[(&str, &[u8])] = files!(
    "README.md",
    "calibration.txt",
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
);
