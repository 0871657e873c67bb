//! Progress on stderr: a bar where stderr is a terminal, a line now and then where it is not, nothing with `--quiet`.
//! Never touches stdout, which belongs to the report.

use std::io::{IsTerminal, Write};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};
use wush_pipeline::{Monitor, human_bytes};

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
        let bar = shows_bar.then(|| bar(stage, unit, total));
        *self.stage() = Some(Stage { name: stage.to_owned(), unit, total, done: 0, started: now, last_line: now, bar });
    }

    fn advance(&self, n: u64) {
        let mut guard = self.stage();
        let Some(stage) = guard.as_mut() else { return };
        stage.done = stage.done.saturating_add(n);
        if let Some(bar) = &stage.bar {
            bar.inc(n);
        } else if self.verbosity != Verbosity::Quiet && stage.last_line.elapsed() >= LINE_INTERVAL {
            stage.last_line = Instant::now();
            line(&stage.line());
        }
    }

    fn end(&self) {
        let Some(stage) = self.stage().take() else { return };
        if let Some(bar) = &stage.bar {
            bar.finish_and_clear();
        }
        if self.verbosity == Verbosity::Verbose {
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
        let (name, unit) = (&self.name, self.unit);
        let done = if unit == "bytes" { human_bytes(self.done) } else { self.done.to_string() };
        let counts = format!("{done} of {}", count(self.total, unit));
        match self.rate() {
            Some(rate) => {
                let left = Duration::from_secs_f64((self.total.saturating_sub(self.done) as f64 / rate).min(1e9));
                format!("{name}: {counts}, {}/s, {} left", count(rate as u64, unit), human_time(left))
            }
            None => format!("{name}: {counts}"),
        }
    }

    /// "calibrate: 16384 tokens in 31 s, 528 tokens/s".
    fn summary(&self) -> String {
        let took = human_time(self.started.elapsed());
        let rate = self.rate().map(|rate| format!(", {}/s", count(rate as u64, self.unit))).unwrap_or_default();
        format!("{}: {} in {took}{rate}", self.name, count(self.done, self.unit))
    }

    fn rate(&self) -> Option<f64> {
        let elapsed = self.started.elapsed();
        (elapsed >= SHORTEST_RATED && self.done > 0).then(|| self.done as f64 / elapsed.as_secs_f64())
    }
}

/// A count with its unit; bytes in binary units.
fn count(n: u64, unit: &str) -> String {
    if unit == "bytes" { human_bytes(n) } else { format!("{n} {unit}") }
}

/// "0.4 s", "31 s", "2 min 05 s", "1 h 02 min".
pub fn human_time(time: Duration) -> String {
    let seconds = time.as_secs();
    match seconds {
        0..10 => format!("{:.1} s", time.as_secs_f64()),
        10..120 => format!("{seconds} s"),
        120..3600 => format!("{} min {:02} s", seconds / 60, seconds % 60),
        _ => format!("{} h {:02} min", seconds / 3600, seconds % 3600 / 60),
    }
}

fn bar(stage: &str, unit: &'static str, total: u64) -> ProgressBar {
    let counts = if unit == "bytes" {
        "{binary_bytes} of {binary_total_bytes}, {binary_bytes_per_sec}".to_owned()
    } else {
        format!("{{pos}} of {{len}} {unit}, {{per_sec}}")
    };
    let template = format!("{{prefix:<12}} {{bar:30}} {counts}, {{eta}} left");
    let bar = ProgressBar::new(total).with_prefix(stage.to_owned());
    if let Ok(style) = ProgressStyle::with_template(&template) {
        bar.set_style(style.progress_chars("=> "));
    }
    bar.enable_steady_tick(Duration::from_millis(250));
    bar
}

/// A closed stderr is no reason to stop.
fn line(text: &str) {
    let _ = writeln!(std::io::stderr(), "{text}");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_read_well() {
        let texts = [0.44, 31.0, 125.0, 3720.0].map(|s| human_time(Duration::from_secs_f64(s)));
        assert_eq!(texts, ["0.4 s", "31 s", "2 min 05 s", "1 h 02 min"]);
    }

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
        assert_eq!(count(2048, "bytes"), "2.0 KiB");
    }
}
