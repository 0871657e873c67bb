//! The bounds of a server. Every one has a default and an option; a request beyond one is told which.

use std::time::Duration;

/// What a server takes at most.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Sequences that are computed at once. Each prompt of a request is one.
    pub max_running: usize,
    /// Sequences that wait beside them.
    pub max_waiting: usize,
    /// Tokens of a sequence, prompt and answer; the model's positions where they are fewer, or when none.
    pub max_len: Option<usize>,
    /// Bytes of keys and values in the cache, of all sequences and kept prefixes together.
    pub max_cache_bytes: u64,
    /// Bytes of a request's body.
    pub max_body_bytes: usize,
    /// Prefixes that are kept for prompts to come; 0 for none.
    pub max_prefixes: usize,
    /// Tokens of prompts that enter between two steps of the answers: of one sequence, Algorithm 2's S'.
    pub chunk: usize,
    /// Time that requests have to end in after the server was asked to stop.
    pub grace: Duration,
}

impl Limits {
    /// Sequences that a server holds, computed and waiting.
    pub(crate) fn max_sequences(&self) -> usize {
        self.max_running.saturating_add(self.max_waiting)
    }
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            max_running: 64,
            max_waiting: 256,
            max_len: None,
            max_cache_bytes: 4_000_000_000,
            max_body_bytes: 4 << 20,
            max_prefixes: 32,
            chunk: 256,
            grace: Duration::from_secs(30),
        }
    }
}

/// Connections that are open at once; more wait in the system's queue. Most of a connection is idle.
pub(crate) const MAX_CONNECTIONS: usize = 1024;
/// Time that a client has to send its request's head in, and to keep an idle connection.
pub(crate) const HEAD_TIME: Duration = Duration::from_secs(60);
/// Time that a client has to send its request's body in.
pub(crate) const BODY_TIME: Duration = Duration::from_secs(60);
/// Bytes of a body that is read whoever else sends one: so many a connection at most are held.
pub(crate) const SMALL_BODY_BYTES: usize = 64 << 10;
/// Larger bodies that are held at once; more wait for their turn.
pub(crate) const MAX_LARGE_BODIES: usize = 16;
/// Time that the engine has to say what the cache holds.
pub(crate) const CENSUS_TIME: Duration = Duration::from_secs(1);
/// Time that a client has to take something of its answer in, before it counts as gone.
pub(crate) const TAKE_TIME: Duration = Duration::from_secs(60);
/// The same at a server's end, and time that a last word to a client may take.
pub(crate) const LAST_WORDS: Duration = Duration::from_secs(2);
/// Silence after which a stream says that it is still there: proxies end silent ones, and it shows who has gone.
pub(crate) const SILENCE: Duration = Duration::from_secs(5);
/// Bytes of a connection that are read ahead, a request's head among them.
pub(crate) const MAX_BUFFER_BYTES: usize = 64 << 10;
/// Prompts of one request.
pub(crate) const MAX_PROMPTS: usize = 128;
/// Alternatives that are listed of a token.
pub(crate) const MAX_LOGPROBS: usize = 20;
/// Log probabilities of one answer, of tokens and alternatives: some 200 bytes each until they are sent.
pub(crate) const MAX_SCORES: usize = 1 << 20;
/// Strings that end a text.
pub(crate) const MAX_STOPS: usize = 16;
/// Bytes of such a string.
pub(crate) const MAX_STOP_BYTES: usize = 1024;
/// Texts that become tokens at once: work of whole cores, taken from the decoder.
pub(crate) const MAX_ENCODERS: u32 = 2;
/// Bytes of a body beyond the bound that are read all the same, so that a client that sends first and reads then has its answer.
pub(crate) const PASSED_OVER_BYTES: usize = 16 << 20;
/// Bytes of a body that takes all turns: what becomes of a byte of text while it is encoded takes more than a hundred.
pub(crate) const LARGE_BODY_BYTES: usize = 256 << 10;
/// Tokens of a completion that names no number, as OpenAI has it.
pub(crate) const DEFAULT_COMPLETION_TOKENS: usize = 16;
/// Tokens of a chat's answer that names no number, where so many are left.
pub(crate) const DEFAULT_CHAT_TOKENS: usize = 1024;
