//! How long work reports itself and learns that it was interrupted. The binary draws; libraries only call.

/// Progress and interruption of one stage. Every method may be called from any thread.
pub trait Monitor: Sync {
    /// A stage begins: `total` units of `unit` ("tokens", "heads", "bytes") lie ahead, 0 where nobody knows.
    fn begin(&self, stage: &str, unit: &'static str, total: u64);
    /// `n` units of the current stage are done.
    fn advance(&self, n: u64);
    /// The current stage is over.
    fn end(&self);
    /// A line worth telling the user, outside the progress bar.
    fn note(&self, line: &str);
    /// True once the user asked to stop; the worker returns its crate's `Interrupted` error at the next safe point.
    fn interrupted(&self) -> bool;
}

/// A monitor that says nothing, and is interrupted when another is: for work whose progress its caller counts.
pub struct Silent<'a>(pub &'a dyn Monitor);

impl Monitor for Silent<'_> {
    fn begin(&self, _stage: &str, _unit: &'static str, _total: u64) {}
    fn advance(&self, _n: u64) {}
    fn end(&self) {}
    fn note(&self, _line: &str) {}
    fn interrupted(&self) -> bool {
        self.0.interrupted()
    }
}

/// A monitor that says nothing and is never interrupted.
#[derive(Debug, Default, Clone, Copy)]
pub struct Quiet;

impl Monitor for Quiet {
    fn begin(&self, _stage: &str, _unit: &'static str, _total: u64) {}
    fn advance(&self, _n: u64) {}
    fn end(&self) {}
    fn note(&self, _line: &str) {}
    fn interrupted(&self) -> bool {
        false
    }
}
