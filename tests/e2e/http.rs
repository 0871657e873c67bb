//! A client of `wush serve` for tests: plain sockets, so that it can vanish, stall and misbehave as it likes.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::Child;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use serde_json::Value;
use wush_tests::{Outcome, Program, signal};

/// Longest wait for a byte, generous for a loaded machine.
const PATIENCE: Duration = Duration::from_secs(120);

/// A running server.
pub struct Server {
    child: Child,
    address: String,
    stderr: std::thread::JoinHandle<String>,
}

/// An answer.
#[derive(Debug, Clone)]
pub struct Answer {
    pub status: u16,
    pub head: String,
    pub body: String,
}

impl Answer {
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|e| panic!("no JSON: {e}: {self:?}"))
    }

    /// The JSON of an answer with status 200.
    pub fn ok(&self) -> Value {
        assert_eq!(self.status, 200, "{self:?}");
        self.json()
    }

    /// OpenAI's error: its code.
    pub fn code(&self) -> String {
        self.json()["error"]["code"].as_str().unwrap_or_else(|| panic!("no error: {self:?}")).to_owned()
    }
}

impl Server {
    /// `wush serve` with `args`, on a free port, ready.
    pub fn start(program: &Program, args: &[String]) -> Self {
        let fixed = ["--port", "0", "--format", "json"].map(str::to_owned);
        let mut child = program.start(&[&["serve".to_owned()], args, &fixed].concat());
        let (told, address) = mpsc::channel();
        let mut lines = BufReader::new(child.stderr.take().expect("piped"));
        let stderr = std::thread::spawn(move || {
            let mut all = String::new();
            let mut line = String::new();
            while lines.read_line(&mut line).is_ok_and(|n| n > 0) {
                if let Some(address) = line.trim_end().strip_prefix("listening  on http://") {
                    let _ = told.send(address.to_owned());
                }
                all += &std::mem::take(&mut line);
            }
            all
        });
        match address.recv_timeout(PATIENCE) {
            Ok(address) => Self { child, address, stderr },
            Err(_) => {
                let _ = child.kill();
                panic!("it does not listen: {:?} {:?}", child.wait_with_output(), stderr.join());
            }
        }
    }

    pub fn connect(&self) -> TcpStream {
        let stream = TcpStream::connect(&self.address).expect("connected");
        stream.set_read_timeout(Some(PATIENCE)).expect("set");
        stream
    }

    /// Sends a request with these headers, and leaves the answer to be read.
    pub fn send(&self, method: &str, path: &str, headers: &str, body: &str) -> TcpStream {
        let mut stream = self.connect();
        let n = body.len();
        let head =
            format!("{method} {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n{headers}Content-Length: {n}\r\n\r\n");
        // A server that has refused already may have closed.
        let _ = stream.write_all(head.as_bytes()).and_then(|()| stream.write_all(body.as_bytes()));
        stream
    }

    pub fn request(&self, method: &str, path: &str, headers: &str, body: &str) -> Answer {
        read(self.send(method, path, headers, body))
    }

    pub fn get(&self, path: &str) -> Answer {
        self.request("GET", path, "", "")
    }

    pub fn post(&self, path: &str, body: &Value) -> Answer {
        self.request("POST", path, JSON, &body.to_string())
    }

    /// A stream of events, as they come.
    pub fn stream(&self, path: &str, body: &Value) -> Events {
        Events { lines: BufReader::new(self.send("POST", path, JSON, &body.to_string())), is_in_head: true }
    }

    /// Waits until a number of `/metrics` is `expected`; one that was never counted is not there.
    pub fn wait_for(&self, name: &str, expected: f64) {
        let clock = Instant::now();
        while self.number(name) != Ok(expected) {
            assert!(clock.elapsed() < PATIENCE, "{name} is not {expected}: {:?}", self.number(name));
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// The most memory that it has had, bytes; none where the system does not say.
    pub fn peak_memory(&self) -> Option<u64> {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.child.id())).ok()?;
        let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
        Some(line.trim().strip_suffix(" kB")?.parse::<u64>().ok()? * 1024)
    }

    /// A number of `/metrics`.
    pub fn metric(&self, name: &str) -> f64 {
        self.number(name).unwrap_or_else(|text| panic!("no {name} in\n{text}"))
    }

    /// The same; all of `/metrics` where it is not there.
    fn number(&self, name: &str) -> Result<f64, String> {
        let text = self.get("/metrics").body;
        let line = text.lines().find(|line| line.strip_prefix(name).is_some_and(|rest| rest.starts_with(' ')));
        line.and_then(|line| line.rsplit(' ').next()?.parse().ok()).ok_or(text)
    }

    pub fn signal(&self, name: &str) {
        signal(&self.child, name);
    }

    /// Waits for its end.
    pub fn wait(self) -> Outcome {
        let mut run = Outcome::of(self.child.wait_with_output().expect("ended"));
        run.stderr = self.stderr.join().expect("read");
        run
    }

    /// SIGTERM, exit code 0, and the report: of an empty cache.
    pub fn stop(self) -> Value {
        self.signal("TERM");
        let run = self.wait();
        assert_eq!(run.code, Some(0), "{run:?}");
        assert!(!run.stderr.contains("panicked"), "{run:?}");
        let report = run.json();
        assert_eq!(report["cache_bytes_left"], 0, "{report}");
        report
    }
}

/// The header of a JSON body.
pub const JSON: &str = "Content-Type: application/json\r\n";

/// Reads an answer to its end.
pub fn read(mut stream: TcpStream) -> Answer {
    let mut bytes = Vec::new();
    // A server that closes before it has read all of a body resets the connection; what came before counts.
    let _ = stream.read_to_end(&mut bytes);
    let text = String::from_utf8(bytes).expect("UTF-8");
    // Words before an answer.
    let text = text.trim_start_matches("HTTP/1.1 100 Continue\r\n\r\n");
    let (head, body) = text.split_once("\r\n\r\n").unwrap_or_else(|| panic!("no head: {text:?}"));
    let status = head.split(' ').nth(1).and_then(|status| status.parse().ok()).unwrap_or_else(|| panic!("{head}"));
    let body = if head.to_ascii_lowercase().contains("transfer-encoding: chunked") {
        dechunked(body)
    } else {
        body.to_owned()
    };
    Answer { status, head: head.to_owned(), body }
}

fn dechunked(mut body: &str) -> String {
    let mut text = String::new();
    while let Some((size, rest)) = body.split_once("\r\n") {
        let n = usize::from_str_radix(size.trim(), 16).unwrap_or(0);
        text += &rest[..n.min(rest.len())];
        body = rest.get(n + 2..).unwrap_or_default();
    }
    text
}

/// Server-sent events, one after another.
pub struct Events {
    lines: BufReader<TcpStream>,
    is_in_head: bool,
}

impl Iterator for Events {
    type Item = Value;

    /// The next event's JSON; none after `[DONE]`, or where the stream ends.
    fn next(&mut self) -> Option<Value> {
        loop {
            let mut line = String::new();
            if self.lines.read_line(&mut line).ok()? == 0 {
                return None;
            }
            if self.is_in_head {
                assert!(!line.starts_with("HTTP/1.1 ") || line.starts_with("HTTP/1.1 200"), "{line}");
                self.is_in_head = line != "\r\n";
                continue;
            }
            match line.trim_end().strip_prefix("data: ") {
                Some("[DONE]") => return None,
                Some(json) => return Some(serde_json::from_str(json).expect("JSON")),
                None => {}
            }
        }
    }
}
