//! Generated text on its way to stdout, piece by piece. On a terminal, what could draw is escaped.

use std::borrow::Cow;
use std::io::{ErrorKind, IsTerminal, Result, Stdout, Write};
use std::ops::ControlFlow;

use wush_pipeline::{PipelineError, printable};

/// stdout, and whether there is still a reader.
pub struct Stream {
    stdout: Stdout,
    is_terminal: bool,
    ends_line: bool,
    result: Result<()>,
}

impl Stream {
    /// This process's stdout.
    pub fn stdout() -> Self {
        let stdout = std::io::stdout();
        Self { is_terminal: stdout.is_terminal(), stdout, ends_line: true, result: Ok(()) }
    }

    /// Writes a piece at once; `Break` when nobody reads.
    pub fn tell(&mut self, piece: &str) -> ControlFlow<()> {
        self.ends_line = piece.ends_with('\n');
        let shown = if self.is_terminal { harmless(piece) } else { Cow::Borrowed(piece) };
        self.result = self.stdout.write_all(shown.as_bytes()).and_then(|()| self.stdout.flush());
        if self.result.is_ok() { ControlFlow::Continue(()) } else { ControlFlow::Break(()) }
    }

    /// Ends the last line.
    ///
    /// # Errors
    /// When stdout could not be written, but for a closed pipe: its reader has seen enough.
    pub fn end(mut self) -> anyhow::Result<()> {
        if self.result.is_ok() && !self.ends_line {
            let _ = self.tell("\n");
        }
        match self.result {
            Err(error) if error.kind() != ErrorKind::BrokenPipe => Err(PipelineError::stdout(error).into()),
            _ => Ok(()),
        }
    }
}

/// Text for a terminal: lines and tabs as they are, everything else that could draw as an escape.
fn harmless(text: &str) -> Cow<'_, str> {
    if text.split(['\n', '\t']).all(|part| matches!(printable(part), Cow::Borrowed(_))) {
        return Cow::Borrowed(text);
    }
    let shown = text.split_inclusive(['\n', '\t']).map(|part| {
        let end = part.len() - usize::from(part.ends_with(['\n', '\t']));
        printable(&part[..end]).into_owned() + &part[end..]
    });
    Cow::Owned(shown.collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_terminal_is_given_lines_and_nothing_that_draws() {
        assert_eq!(harmless("a\tb\n\nc"), "a\tb\n\nc");
        assert_eq!(harmless("\u{1b}[2J\n\rx\n"), "\\u{1b}[2J\n\\rx\n");
    }
}
