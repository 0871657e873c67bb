//! Fuzzes the reading of any bytes as model.safetensors.index.json.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    wush_fuzz::checks::index(bytes);
});
