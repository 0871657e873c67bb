//! What every fuzz target asserts, one function a kind of file. The same functions replay the corpus in
//! `crates/wush-format/tests/corpus.rs`, without a fuzzer.

pub mod checks;
