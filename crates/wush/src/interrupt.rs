//! Ctrl-C, SIGTERM and SIGHUP: the first asks the work to stop at the next safe point, the second ends the process at
//! once. Either way no half-written output stays under its final name. Also SIGXFSZ, which must not end the process at all.

use std::io::{IsTerminal, Write};
use std::sync::atomic::{AtomicBool, Ordering};

/// Exit code after a stop that was asked for: 128 + SIGINT, as shells report it.
pub const EXIT_INTERRUPTED: u8 = 130;

static REQUESTED: AtomicBool = AtomicBool::new(false);

/// Whether the user asked to stop.
pub fn requested() -> bool {
    REQUESTED.load(Ordering::Relaxed)
}

/// Takes the signals over, but for those that whoever started the process has it ignore (`nohup`, a script's background job).
///
/// # Errors
/// When the system refuses the handler.
pub fn install() -> anyhow::Result<()> {
    outlive_size_limits()?;
    on_signal(|| {
        if REQUESTED.swap(true, Ordering::Relaxed) {
            std::process::exit(i32::from(EXIT_INTERRUPTED));
        }
        let mut stderr = std::io::stderr();
        // Below the progress bar, which ends without a line's end.
        let start = if stderr.is_terminal() { "\n" } else { "" };
        // A closed stderr must not turn a clean stop into a panic.
        let _ = writeln!(stderr, "{start}stopping at the next safe point (Ctrl-C again: at once)");
    })
}

/// Calls `told` on a thread of its own whenever a signal asks the process to end.
#[cfg(unix)]
fn on_signal(mut told: impl FnMut() + Send + 'static) -> anyhow::Result<()> {
    use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
    let ignored = ignored_signals();
    let taken = [SIGHUP, SIGINT, SIGTERM].into_iter().filter(|signal| ignored & (1 << (signal - 1)) == 0);
    let mut signals = signal_hook::iterator::Signals::new(taken)?;
    let wait = move || signals.forever().for_each(|_| told());
    std::thread::Builder::new().name("signals".to_owned()).spawn(wait)?;
    Ok(())
}

#[cfg(not(unix))]
fn on_signal(told: impl FnMut() + Send + 'static) -> anyhow::Result<()> {
    Ok(ctrlc::set_handler(told)?)
}

/// Signals that the process was started to ignore, signal n as bit n - 1; none where the system does not tell (Linux does).
#[cfg(unix)]
fn ignored_signals() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0)
}

/// A write beyond a limit on file sizes (`ulimit -f`) sends SIGXFSZ, which ends a process that does nothing about it. With any
/// handler the write fails like one on a full disk, and cleans up.
#[cfg(unix)]
fn outlive_size_limits() -> std::io::Result<()> {
    let unread = std::sync::Arc::new(AtomicBool::new(false));
    signal_hook::flag::register(signal_hook::consts::SIGXFSZ, unread).map(drop)
}

#[cfg(not(unix))]
fn outlive_size_limits() -> std::io::Result<()> {
    Ok(())
}
