//! Tests of the cache as a server uses it, against a naive one in f64.

mod attention;
mod common;
mod errors;
mod sequences;
mod transforms;
