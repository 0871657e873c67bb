//! Fuzzes the reading of any bytes as a safetensors file.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    wush_fuzz::checks::safetensors_header(bytes);
});
