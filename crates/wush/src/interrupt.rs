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

/// Takes the signals over.
///
/// # Errors
/// When the system refuses the handler.
pub fn install() -> anyhow::Result<()> {
    outlive_size_limits()?;
    Ok(ctrlc::set_handler(|| {
        if REQUESTED.swap(true, Ordering::Relaxed) {
            std::process::exit(i32::from(EXIT_INTERRUPTED));
        }
        let mut stderr = std::io::stderr();
        // Below the progress bar, which ends without a line's end.
        let start = if stderr.is_terminal() { "\n" } else { "" };
        // A closed stderr must not turn a clean stop into a panic.
        let _ = writeln!(stderr, "{start}stopping at the next safe point (Ctrl-C again: at once)");
    })?)
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
