//! The program as a user runs it: real binary, real files, what is printed and what is left behind.
//!
//! Every run is offline and writes into a temporary directory. Numbers differ between processors in their last digits, so
//! bytes are compared between runs on one machine and snapshots leave numbers out.

mod bundle;
mod cli;
mod common;
mod errors;
mod eval;
mod export;
mod generate;
mod http;
mod interrupt;
mod robust;
mod serve;
mod serve_clients;
mod stages;
