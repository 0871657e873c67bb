//! Fuzzes the reading of a header text and data as a key sidecar, a value sidecar and a transforms file.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    wush_fuzz::checks::sidecar(bytes);
});
