//! An HTTP server in the form of OpenAI's API over `wush-generate`'s batch: continuous batching, prefix reuse, streaming.
//!
//! Enters: a decoder with its cache, a tokenizer, a chat template, an address and limits. Leaves: answers over HTTP, and a
//! summary at the end. Knows nothing of bundles, files or the command line.
//!
//! # Where things are
//!
//! [`serve`] in `server.rs` is the way from an address to an orderly end; `connection.rs` watches each client and counts its
//! requests. `routes.rs` has the endpoints. A request goes through
//! `fields.rs` (JSON, nothing unknown), `plan.rs` (what was asked for), `prompts.rs` (tokens, checked against the model and the limits) and `engine.rs`, the one thread that
//! owns decoder and cache; its tokens become text in `text.rs` and `vocabulary.rs`, and JSON in `reply.rs`.
//!
//! # What holds
//!
//! - A sequence gets in any company what it gets alone, bit for bit; a reused prefix changes nothing either.
//! - Everything is bounded: bodies, prompts, sequences at once and waiting, bytes of the cache, connections.
//! - A client that went away is noticed within a second, that of a stream before its first token within five, and its sequence's
//!   pages are freed between two steps.
//!
//! ```
//! use wush_serve::{ApiKey, Limits};
//!
//! let key = ApiKey::new("secret").expect("not empty");
//! assert!(key.is("secret") && !key.is("Secret"));
//! assert_eq!(Limits::default().max_running, 64);
//! ```

mod auth;
mod body;
mod connection;
mod engine;
mod error;
mod fields;
mod limits;
mod metrics;
mod plan;
mod prefix;
mod prompts;
mod reply;
mod routes;
mod score;
mod server;
mod stops;
mod text;
mod vocabulary;

pub use auth::ApiKey;
pub use error::{Result, ServeError};
pub use limits::Limits;
pub use server::{Served, Settings, Summary, serve};
