//! Ctrl-C, SIGTERM and SIGHUP: the first asks the work to stop at the next safe point, the second ends the process at
//! once. Either way no half-written output stays under its final name.

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
pub fn install() -> Result<(), ctrlc::Error> {
    ctrlc::set_handler(|| {
        if REQUESTED.swap(true, Ordering::Relaxed) {
            std::process::exit(i32::from(EXIT_INTERRUPTED));
        }
        // A closed stderr must not turn a clean stop into a panic.
        use std::io::Write;
        let _ = writeln!(std::io::stderr(), "stopping at the next safe point (Ctrl-C again: at once)");
    })
}
