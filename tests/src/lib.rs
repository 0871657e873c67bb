//! Helpers of the end-to-end tests: fixtures, scratch directories, and the program run as a user runs it.
//!
//! Enters: arguments. Leaves: exit code, stdout, stderr. Knows nothing of what the program does, so that it cannot agree with it by
//! construction.
//!
//! ```
//! let scratch = wush_tests::Scratch::new();
//! let model = scratch.copy_of(&wush_tests::fixture("demo-model"), "model");
//! assert!(model.join("config.json").is_file());
//! ```

use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};

/// The repository's root.
pub fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("tests/ lies in the root").to_owned()
}

/// `tests/fixtures/{name}`.
pub fn fixture(name: &str) -> PathBuf {
    root().join("tests/fixtures").join(name)
}

/// A temporary directory, removed at the end.
pub struct Scratch(tempfile::TempDir);

impl Default for Scratch {
    fn default() -> Self {
        Self::new()
    }
}

impl Scratch {
    /// A new one.
    ///
    /// # Panics
    /// When the system has no room.
    pub fn new() -> Self {
        Self(tempfile::tempdir().expect("a temporary directory"))
    }

    /// Its path.
    pub fn path(&self) -> &Path {
        self.0.path()
    }

    /// A path inside.
    pub fn join(&self, name: &str) -> PathBuf {
        self.path().join(name)
    }

    /// Copies the directory `source`, all its files, to `name` inside.
    ///
    /// # Panics
    /// When it cannot.
    pub fn copy_of(&self, source: &Path, name: &str) -> PathBuf {
        let target = self.join(name);
        copy_dir(source, &target);
        target
    }

    /// Writes a file inside and gives its path.
    ///
    /// # Panics
    /// When it cannot.
    pub fn write(&self, name: &str, content: impl AsRef<[u8]>) -> PathBuf {
        let path = self.join(name);
        fs::write(&path, content).expect("written");
        path
    }
}

fn copy_dir(source: &Path, target: &Path) {
    fs::create_dir_all(target).expect("created");
    for entry in fs::read_dir(source).expect("listed") {
        let entry = entry.expect("an entry");
        let to = target.join(entry.file_name());
        if entry.path().is_dir() {
            copy_dir(&entry.path(), &to);
        } else {
            fs::copy(entry.path(), &to).expect("copied");
        }
    }
}

/// Every file below `dir`, as sorted relative paths with forward slashes, and its content.
///
/// # Panics
/// When a file cannot be read.
pub fn contents(dir: &Path) -> Vec<(String, Vec<u8>)> {
    let mut files = Vec::new();
    collect(dir, "", &mut files);
    files.sort();
    files
}

fn collect(dir: &Path, prefix: &str, into: &mut Vec<(String, Vec<u8>)>) {
    for entry in fs::read_dir(dir).expect("listed") {
        let entry = entry.expect("an entry");
        let name = format!("{prefix}{}", entry.file_name().to_string_lossy());
        if entry.path().is_dir() {
            collect(&entry.path(), &format!("{name}/"), into);
        } else {
            into.push((name, fs::read(entry.path()).expect("read")));
        }
    }
}

/// Names in `dir`, sorted: what a run left behind.
///
/// # Panics
/// When it cannot be listed.
pub fn names(dir: &Path) -> Vec<String> {
    let entries = fs::read_dir(dir).expect("listed");
    let mut names: Vec<_> = entries.map(|e| e.expect("an entry").file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    names
}

/// The program under test, run in a directory.
#[derive(Debug, Clone)]
pub struct Program {
    path: PathBuf,
    dir: PathBuf,
}

impl Program {
    /// `path` run in `dir`, offline and with an empty hub cache: no test reaches the network.
    pub fn new(path: &str, dir: &Path) -> Self {
        Self { path: path.into(), dir: dir.to_owned() }
    }

    /// The command, to be started. It ignores no signal, whatever the tests were started to ignore: a program of wush would go on
    /// ignoring it.
    pub fn command<A: AsRef<OsStr>>(&self, args: &[A]) -> Command {
        let mut command = Command::new("env");
        command.arg("--default-signal=HUP,INT,TERM").arg(&self.path).args(args);
        self.confine(&mut command);
        command
    }

    /// The same, through `sh -c "{prelude}; exec …"`: for limits that a shell sets.
    pub fn command_after<A: AsRef<OsStr>>(&self, prelude: &str, args: &[A]) -> Command {
        let mut command = Command::new("sh");
        command.arg("-c").arg(format!("{prelude}; exec \"$0\" \"$@\"")).arg(&self.path).args(args);
        self.confine(&mut command);
        command
    }

    fn confine(&self, command: &mut Command) {
        command.current_dir(&self.dir).stdin(Stdio::null());
        // No GPU: what is printed and computed is the same everywhere.
        command.env("CUDA_VISIBLE_DEVICES", "");
        command.env("HF_HUB_OFFLINE", "1").env("HF_HOME", self.dir.join("no-hub")).env_remove("HF_HUB_CACHE");
        // The width of help texts.
        command.env_remove("COLUMNS");
    }

    /// Runs it to its end.
    ///
    /// # Panics
    /// When it cannot be started.
    pub fn run<A: AsRef<OsStr>>(&self, args: &[A]) -> Outcome {
        Outcome::of(self.command(args).output().expect("the program starts"))
    }

    /// Runs it to its end and asserts exit code 0.
    ///
    /// # Panics
    /// When it exits otherwise.
    pub fn ok<A: AsRef<OsStr>>(&self, args: &[A]) -> Outcome {
        let outcome = self.run(args);
        assert_eq!(outcome.code, Some(0), "{outcome:?}");
        outcome
    }

    /// Starts it with piped output.
    ///
    /// # Panics
    /// When it cannot be started.
    pub fn start<A: AsRef<OsStr>>(&self, args: &[A]) -> Child {
        self.command(args).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("the program starts")
    }
}

/// Sends a signal by name, "INT", to a child.
///
/// # Panics
/// When there is no `kill`.
pub fn signal(child: &Child, name: &str) {
    let sent = Command::new("kill").arg(format!("-{name}")).arg(child.id().to_string()).output().expect("kill starts");
    // A child that ended a moment ago is nothing to assert here: its exit code tells.
    drop(sent);
}

/// What a run left.
#[derive(Clone, PartialEq, Eq)]
pub struct Outcome {
    /// Exit code; none when a signal ended it.
    pub code: Option<i32>,
    /// Standard output.
    pub stdout: String,
    /// Standard error.
    pub stderr: String,
}

impl std::fmt::Debug for Outcome {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "exit code {:?}\n--- stdout\n{}\n--- stderr\n{}", self.code, self.stdout, self.stderr)
    }
}

impl Outcome {
    /// From a finished process.
    pub fn of(output: Output) -> Self {
        let text = |bytes| String::from_utf8_lossy(bytes).into_owned();
        Self { code: output.status.code(), stdout: text(&output.stdout), stderr: text(&output.stderr) }
    }

    /// Stdout as JSON.
    ///
    /// # Panics
    /// When it is none.
    pub fn json(&self) -> serde_json::Value {
        serde_json::from_str(&self.stdout).unwrap_or_else(|e| panic!("stdout is no JSON: {e}\n{self:?}"))
    }
}
