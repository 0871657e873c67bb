//! Counters and gauges, in Prometheus' text form.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use crate::engine::Census;

/// A number that only grows, or a gauge.
#[derive(Debug, Default)]
pub(crate) struct Number(AtomicU64);

impl Number {
    pub(crate) fn add(&self, n: u64) {
        self.0.fetch_add(n, Ordering::Relaxed);
    }

    fn set(&self, n: u64) {
        self.0.store(n, Ordering::Relaxed);
    }

    pub(crate) fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// Upper ends of a histogram's buckets, seconds.
const BUCKETS: [f64; 12] = [0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 60.0];

/// How long something took, by buckets.
#[derive(Debug, Default)]
pub(crate) struct Histogram {
    counts: [Number; BUCKETS.len()],
    count: Number,
    /// Microseconds.
    sum: Number,
}

impl Histogram {
    pub(crate) fn observe(&self, time: Duration) {
        let seconds = time.as_secs_f64();
        if let Some(at) = BUCKETS.iter().position(|&end| seconds <= end) {
            self.counts[at].add(1);
        }
        self.count.add(1);
        self.sum.add(u64::try_from(time.as_micros()).unwrap_or(u64::MAX));
    }
}

/// How a request ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Outcome {
    /// The client was sent a whole answer.
    Answered,
    /// It went away before that.
    Cancelled,
}

impl Outcome {
    fn name(self) -> &'static str {
        match self {
            Self::Answered => "answered",
            Self::Cancelled => "cancelled",
        }
    }
}

/// Endpoint, status and outcome of a request.
type Ending = (&'static str, Option<u16>, Outcome);

/// What a server counts.
#[derive(Debug, Default)]
pub(crate) struct Metrics {
    requests: Mutex<BTreeMap<Ending, u64>>,
    pub(crate) n_prompt_tokens: Number,
    pub(crate) n_reused_tokens: Number,
    pub(crate) n_generated_tokens: Number,
    pub(crate) n_cancelled: Number,
    pub(crate) n_steps: Number,
    pub(crate) first_token: Histogram,
    pub(crate) next_token: Histogram,
    /// Whole requests for text.
    pub(crate) request: Histogram,
    running: Number,
    waiting: Number,
}

impl Metrics {
    /// A request that has ended; no status where the client went away before it had one.
    pub(crate) fn count_request(&self, endpoint: &'static str, status: Option<u16>, outcome: Outcome) {
        let mut requests = self.requests.lock().unwrap_or_else(PoisonError::into_inner);
        *requests.entry((endpoint, status, outcome)).or_default() += 1;
    }

    /// All requests that have ended.
    pub(crate) fn n_requests(&self) -> u64 {
        self.requests.lock().unwrap_or_else(PoisonError::into_inner).values().sum()
    }

    pub(crate) fn set_load(&self, running: usize, waiting: usize) {
        self.running.set(running as u64);
        self.waiting.set(waiting as u64);
    }

    /// All of it as text; the cache's part where the engine told it.
    pub(crate) fn text(&self, census: Option<Census>, budget: u64) -> String {
        let mut page = Page(String::new());
        page.head("wush_requests_total", "counter", "HTTP requests that have ended, by endpoint, status and outcome");
        for ((endpoint, status, outcome), n) in &*self.requests.lock().unwrap_or_else(PoisonError::into_inner) {
            let (status, outcome) = (status.map_or("none".to_owned(), |status| status.to_string()), outcome.name());
            let labels = format!("{{endpoint=\"{endpoint}\",status=\"{status}\",outcome=\"{outcome}\"}}");
            page.line("wush_requests_total", &labels, n);
        }
        for (name, help, number) in [
            ("wush_prompt_tokens_total", "tokens of prompts that were computed", &self.n_prompt_tokens),
            ("wush_reused_prompt_tokens_total", "tokens of prompts that a kept prefix had", &self.n_reused_tokens),
            ("wush_generated_tokens_total", "tokens generated", &self.n_generated_tokens),
            ("wush_cancelled_sequences_total", "sequences that nobody waited for any more", &self.n_cancelled),
            ("wush_decode_steps_total", "steps of one token of every running sequence", &self.n_steps),
        ] {
            page.single(name, "counter", help, number.get());
        }
        page.single("wush_running_sequences", "gauge", "sequences that are computed", self.running.get());
        page.single("wush_waiting_sequences", "gauge", "sequences that wait", self.waiting.get());
        page.histogram("wush_first_token_seconds", "time from a request to its first token", &self.first_token);
        page.histogram("wush_next_token_seconds", "time from a token of a text to its next", &self.next_token);
        page.histogram("wush_request_seconds", "time from a request for text to the end of its answer", &self.request);
        page.single("wush_cache_budget_bytes", "gauge", "bytes that the cache may take", budget);
        if let Some(census) = census {
            page.census(&census);
        }
        page.0
    }
}

struct Page(String);

impl Page {
    fn head(&mut self, name: &str, kind: &str, help: &str) {
        let _ = writeln!(self.0, "# HELP {name} {help}\n# TYPE {name} {kind}");
    }

    fn line(&mut self, name: &str, labels: &str, value: impl std::fmt::Display) {
        let _ = writeln!(self.0, "{name}{labels} {value}");
    }

    fn single(&mut self, name: &str, kind: &str, help: &str, value: u64) {
        self.head(name, kind, help);
        self.line(name, "", value);
    }

    fn histogram(&mut self, name: &str, help: &str, histogram: &Histogram) {
        self.head(name, "histogram", help);
        let mut sum = 0;
        for (end, count) in BUCKETS.iter().zip(&histogram.counts) {
            sum += count.get();
            self.line(&format!("{name}_bucket"), &format!("{{le=\"{end}\"}}"), sum);
        }
        // A first token that came meanwhile is in no bucket yet.
        let count = histogram.count.get().max(sum);
        self.line(&format!("{name}_bucket"), "{le=\"+Inf\"}", count);
        self.line(&format!("{name}_sum"), "", histogram.sum.get() as f64 / 1e6);
        self.line(&format!("{name}_count"), "", count);
    }

    fn census(&mut self, census: &Census) {
        let Census { memory, n_sequences, n_prefixes, reserved } = *census;
        self.head("wush_cache_bytes", "gauge", "bytes allocated by the cache, by kind");
        for (kind, bytes) in [
            ("page_keys", memory.page_keys),
            ("page_values", memory.page_values),
            ("window_keys", memory.window_keys),
            ("window_values", memory.window_values),
            ("index", memory.index),
        ] {
            self.line("wush_cache_bytes", &format!("{{kind=\"{kind}\"}}"), bytes);
        }
        self.single("wush_cache_reserved_bytes", "gauge", "bytes that sequences and kept prefixes may take", reserved);
        self.single("wush_cache_sequences", "gauge", "sequences in the cache", n_sequences as u64);
        self.single("wush_cache_prefixes", "gauge", "kept prefixes of prompts", n_prefixes as u64);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_add_up() {
        let metrics = Metrics::default();
        for ms in [1, 30, 70_000] {
            metrics.first_token.observe(Duration::from_millis(ms));
        }
        metrics.count_request("completions", Some(200), Outcome::Answered);
        metrics.count_request("completions", Some(200), Outcome::Answered);
        metrics.count_request("completions", None, Outcome::Cancelled);
        let text = metrics.text(None, 7);
        for line in [
            "wush_requests_total{endpoint=\"completions\",status=\"200\",outcome=\"answered\"} 2",
            "wush_requests_total{endpoint=\"completions\",status=\"none\",outcome=\"cancelled\"} 1",
            "wush_first_token_seconds_bucket{le=\"0.005\"} 1",
            "wush_first_token_seconds_bucket{le=\"0.05\"} 2",
            "wush_first_token_seconds_bucket{le=\"60\"} 2",
            "wush_first_token_seconds_bucket{le=\"+Inf\"} 3",
            "wush_first_token_seconds_sum 70.031",
            "wush_first_token_seconds_count 3",
            "wush_cache_budget_bytes 7",
        ] {
            assert!(text.lines().any(|found| found == line), "no {line} in\n{text}");
        }
    }
}
