//! Progress on stderr: a bar where stderr is a terminal, a line now and then where it is not, nothing with `--quiet`.
//! Never touches stdout, which belongs to the report.

use std::io::{IsTerminal, Write};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressState, ProgressStyle};
use wush_pipeline::{Monitor, human_bytes, human_time, printable};

use crate::interrupt;

/// Shortest time between two progress lines of one stage.
const LINE_INTERVAL: Duration = Duration::from_secs(10);
/// A stage shorter than this reports no rate: it would be noise.
const SHORTEST_RATED: Duration = Duration::from_millis(50);

/// How much is said.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verbosity {
    /// Nothing.
    Quiet,
    /// Progress and notes.
    Normal,
    /// Also what each stage took.
    Verbose,
}

/// The monitor of the command line.
pub struct Progress {
    verbosity: Verbosity,
    is_terminal: bool,
    stage: Mutex<Option<Stage>>,
}

struct Stage {
    name: String,
    unit: &'static str,
    total: u64,
    done: u64,
    started: Instant,
    last_line: Instant,
    bar: Option<ProgressBar>,
    /// Whether a line told of it, whose last one then tells its end.
    is_told: bool,
}

impl Progress {
    /// For this process's stderr.
    pub fn new(verbosity: Verbosity) -> Self {
        Self { verbosity, is_terminal: std::io::stderr().is_terminal(), stage: Mutex::new(None) }
    }

    fn stage(&self) -> MutexGuard<'_, Option<Stage>> {
        // A panic elsewhere leaves at worst a wrong count.
        self.stage.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Monitor for Progress {
    fn begin(&self, stage: &str, unit: &'static str, total: u64) {
        let now = Instant::now();
        let shows_bar = self.is_terminal && self.verbosity != Verbosity::Quiet;
        let name = printable(stage).into_owned();
        let bar = shows_bar.then(|| bar(&name, unit, total));
        *self.stage() = Some(Stage { name, unit, total, done: 0, started: now, last_line: now, bar, is_told: false });
    }

    fn advance(&self, n: u64) {
        let mut guard = self.stage();
        let Some(stage) = guard.as_mut() else { return };
        stage.done = stage.done.saturating_add(n);
        if let Some(bar) = &stage.bar {
            bar.inc(n);
        } else if self.verbosity != Verbosity::Quiet && stage.last_line.elapsed() >= LINE_INTERVAL {
            stage.last_line = Instant::now();
            stage.is_told = true;
            line(&stage.line());
        }
    }

    fn end(&self) {
        let Some(stage) = self.stage().take() else { return };
        if let Some(bar) = &stage.bar {
            bar.finish_and_clear();
        }
        if self.verbosity == Verbosity::Verbose || stage.is_told {
            line(&stage.summary());
        }
    }

    fn note(&self, text: &str) {
        if self.verbosity == Verbosity::Quiet {
            return;
        }
        match self.stage().as_ref().and_then(|stage| stage.bar.as_ref()) {
            Some(bar) => bar.suspend(|| line(text)),
            None => line(text),
        }
    }

    fn interrupted(&self) -> bool {
        interrupt::requested()
    }
}

impl Stage {
    /// "calibrate: 4096 of 16384 tokens, 512 tokens/s, 24 s left".
    fn line(&self) -> String {
        format!("{}: {}", self.name, counts(self.done, self.total, self.unit, self.rate()))
    }

    /// "calibrate: 16384 tokens in 31 s, 528 tokens/s".
    fn summary(&self) -> String {
        let took = human_time(self.started.elapsed());
        let rate = self.rate().map(|rate| format!(", {}/s", count(rate as u64, self.unit))).unwrap_or_default();
        format!("{}: {} in {took}{rate}", self.name, count(self.done, self.unit))
    }

    fn rate(&self) -> Option<f64> {
        let elapsed = self.started.elapsed();
        rate(self.done, elapsed)
    }
}

/// Units a second, once there is something to tell.
fn rate(done: u64, elapsed: Duration) -> Option<f64> {
    (elapsed >= SHORTEST_RATED && done > 0).then(|| done as f64 / elapsed.as_secs_f64())
}

/// "4096 of 16384 tokens, 512 tokens/s, 24 s left"; no rate, no total and no time where none is known.
fn counts(done: u64, total: u64, unit: &str, rate: Option<f64>) -> String {
    let number = if unit == "bytes" { human_bytes(done) } else { done.to_string() };
    let of_total = if total == 0 { count(done, unit) } else { format!("{number} of {}", count(total, unit)) };
    let Some(rate) = rate else { return of_total };
    if total == 0 {
        return format!("{of_total}, {}/s", count(rate.round() as u64, unit));
    }
    let left = Duration::from_secs_f64((total.saturating_sub(done) as f64 / rate).min(1e9));
    format!("{of_total}, {}/s, {} left", count(rate.round() as u64, unit), human_time(left))
}

/// A count with its unit; bytes in powers of ten.
fn count(n: u64, unit: &str) -> String {
    if unit == "bytes" { human_bytes(n) } else { format!("{n} {unit}") }
}

fn bar(stage: &str, unit: &'static str, total: u64) -> ProgressBar {
    let told = move |state: &ProgressState, out: &mut dyn std::fmt::Write| {
        let (done, total) = (state.pos(), state.len().unwrap_or(0));
        // A terminal that is gone shows nothing.
        let _ = out.write_str(&counts(done, total, unit, rate(done, state.elapsed())));
    };
    let bar = ProgressBar::new(total).with_prefix(stage.to_owned());
    if let Ok(style) = ProgressStyle::with_template("{prefix:<12} {wide_bar} {counts}") {
        bar.set_style(style.with_key("counts", told).progress_chars("=> "));
    }
    bar.enable_steady_tick(Duration::from_millis(250));
    bar
}

/// A closed stderr is no reason to stop.
fn line(text: &str) {
    let _ = writeln!(std::io::stderr(), "{}", printable(text));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stage_counts_and_ends() {
        let progress = Progress::new(Verbosity::Quiet);
        progress.begin("fold", "bytes", 4096);
        progress.advance(1024);
        progress.advance(u64::MAX);
        assert_eq!(progress.stage().as_ref().map(|stage| stage.done), Some(u64::MAX));
        progress.end();
        assert!(progress.stage().is_none());
        progress.advance(1);
    }

    #[test]
    fn counts_bear_their_unit() {
        assert_eq!(count(12, "tokens"), "12 tokens");
        assert_eq!(count(2048, "bytes"), "2.0 kB");
    }

    #[test]
    fn rates_are_whole_and_told_only_once_known() {
        assert_eq!(counts(0, 8192, "tokens", rate(0, Duration::from_secs(3))), "0 of 8192 tokens");
        let known = counts(4096, 8192, "tokens", Some(2712.1543));
        assert_eq!(known, "4096 of 8192 tokens, 2712 tokens/s, 1.5 s left");
        assert_eq!(counts(4096, 0, "tokens", Some(2712.1543)), "4096 tokens, 2712 tokens/s");
    }
}
