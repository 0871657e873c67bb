//! Calls into libraries that panic on some files that they accept. Enters: a call. Leaves: its result, or that it panicked,
//! with nothing printed. Meant for readers of hostile files alone: a panic of wush's own is a bug and must be seen.

use std::panic::{AssertUnwindSafe, catch_unwind, set_hook, take_hook};
use std::sync::Once;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Guarded calls under way, in all threads: a library may panic in a thread of a pool.
static UNDER_WAY: AtomicUsize = AtomicUsize::new(0);
/// The hook is put in front of the program's own once.
static HOOK: Once = Once::new();

/// The call panicked. What it worked on must not be used again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Panicked;

/// Runs `work`, and takes a panic for its result. While it runs, no panic of any thread prints its message.
///
/// # Errors
/// [`Panicked`].
pub fn guarded<T>(work: impl FnOnce() -> T) -> Result<T, Panicked> {
    HOOK.call_once(|| {
        let before = take_hook();
        set_hook(Box::new(move |info| {
            if UNDER_WAY.load(Ordering::Relaxed) == 0 {
                before(info);
            }
        }));
    });
    UNDER_WAY.fetch_add(1, Ordering::Relaxed);
    let result = catch_unwind(AssertUnwindSafe(work));
    UNDER_WAY.fetch_sub(1, Ordering::Relaxed);
    result.map_err(|_| Panicked)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_is_a_result() {
        assert_eq!(guarded(|| 3), Ok(3));
        let empty: &[u8] = std::hint::black_box(&[]);
        assert_eq!(guarded(|| empty[0]), Err(Panicked));
        assert_eq!(UNDER_WAY.load(Ordering::Relaxed), 0);
    }
}
