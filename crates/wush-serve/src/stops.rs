//! Whether the server was asked to stop, or cannot go on: set once, seen by all.

use tokio::sync::watch;

/// Set once.
#[derive(Debug)]
pub(crate) struct Stops(watch::Sender<bool>);

impl Default for Stops {
    fn default() -> Self {
        Self(watch::Sender::new(false))
    }
}

impl Stops {
    pub(crate) fn set(&self) {
        self.0.send_replace(true);
    }

    pub(crate) fn is_set(&self) -> bool {
        *self.0.borrow()
    }

    /// Ends when it is set.
    pub(crate) async fn wait(&self) {
        // The sender lives as long as this borrow.
        let _ = self.0.subscribe().wait_for(|&is_set| is_set).await;
    }
}
