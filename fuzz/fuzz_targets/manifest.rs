//! Fuzzes the reading of any bytes as wush/manifest.json.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    wush_fuzz::checks::manifest(bytes);
});
