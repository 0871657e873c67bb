//! A server on 127.0.0.1 that answers like the Hugging Face hub (information, paged listings, `resolve` with ETag,
//! `x-repo-commit`, ranges, redirects to storage of another origin), and misbehaves as told. It logs every request.

use std::collections::{BTreeMap, VecDeque};
use std::io::{BufRead, BufReader, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex};

use wush_format::hash::Sha;

/// The commit of every repository served.
pub const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";
/// Entries in a page of a listing.
const PAGE: usize = 3;

/// One misbehaviour, used up by one `GET` of a file's content.
#[derive(Debug, Clone)]
pub enum Fault {
    /// The connection closes after so many bytes of the body.
    Cut(usize),
    /// The whole file, whatever range was asked for.
    IgnoreRange,
    /// A range one byte further on than asked for.
    WrongRange,
    /// More bytes than announced.
    Longer,
    /// Other bytes, as many as announced.
    Corrupt,
    /// A status, with `X-Error-Code` if not empty.
    Status(u16, &'static str),
}

#[derive(Debug, Clone)]
pub struct Served {
    pub bytes: Vec<u8>,
    /// In large-file storage: the ETag is the SHA-256, and `resolve` redirects to storage.
    pub large: bool,
    /// In place of the true ETag.
    pub etag: Option<String>,
}

#[derive(Debug, Default)]
pub struct State {
    /// By `models/org/name` or `datasets/org/name`, then by path.
    pub repositories: BTreeMap<String, BTreeMap<String, Served>>,
    /// By path inside the repository.
    pub faults: BTreeMap<String, VecDeque<Fault>>,
    /// A status for every `resolve` request.
    pub refuse: Option<(u16, &'static str)>,
    /// What the hub says the commit is.
    pub commit: Option<String>,
    pub log: Vec<String>,
}

pub struct HubServer {
    pub endpoint: String,
    pub state: Arc<Mutex<State>>,
}

impl HubServer {
    pub fn start() -> Self {
        let state = Arc::new(Mutex::new(State::default()));
        let storage = listen(Arc::clone(&state), None);
        let hub = listen(Arc::clone(&state), Some(storage));
        Self { endpoint: format!("http://{hub}"), state }
    }

    pub fn put(&self, repository: &str, path: &str, bytes: &[u8], large: bool) -> &Self {
        let served = Served { bytes: bytes.to_vec(), large, etag: None };
        let mut state = self.state.lock().expect("no thread panicked");
        state.repositories.entry(repository.to_owned()).or_default().insert(path.to_owned(), served);
        drop(state);
        self
    }

    pub fn fault(&self, path: &str, faults: &[Fault]) {
        let mut state = self.state.lock().expect("no thread panicked");
        state.faults.insert(path.to_owned(), faults.iter().cloned().collect());
    }

    /// The requests since the last call, one line each: method, path, and range and token where there are.
    pub fn take_log(&self) -> Vec<String> {
        std::mem::take(&mut self.state.lock().expect("no thread panicked").log)
    }
}

pub fn etag_of(file: &Served) -> String {
    let sha = Sha::of(&file.bytes).to_string();
    file.etag.clone().unwrap_or_else(|| if file.large { sha } else { sha[..40].to_owned() })
}

/// Serves on a free port: the hub when it knows where storage is, else storage.
fn listen(state: Arc<Mutex<State>>, storage: Option<SocketAddr>) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let address = listener.local_addr().expect("bound");
    std::thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            let state = Arc::clone(&state);
            std::thread::spawn(move || {
                // A client that goes away in the middle is part of the tests.
                let _ = answer(stream, &state, address, storage);
            });
        }
    });
    address
}

struct Request {
    method: String,
    path: String,
    query: String,
    range: Option<u64>,
}

struct Answer {
    status: u16,
    headers: Vec<(&'static str, String)>,
    body: Vec<u8>,
    /// Close after so many bytes of the body.
    cut: usize,
}

impl Answer {
    fn new(status: u16, headers: Vec<(&'static str, String)>, body: Vec<u8>) -> Self {
        let cut = body.len();
        Self { status, headers, body, cut }
    }

    fn error(status: u16, code: &str) -> Self {
        let headers = if code.is_empty() { Vec::new() } else { vec![("X-Error-Code", code.to_owned())] };
        Self::new(status, headers, b"{\"error\":\"refused\"}".to_vec())
    }
}

fn answer(
    stream: TcpStream,
    state: &Mutex<State>,
    own: SocketAddr,
    storage: Option<SocketAddr>,
) -> std::io::Result<()> {
    let mut reader = BufReader::new(stream.try_clone()?);
    let request = read_request(&mut reader, state, storage.is_some())?;
    let answer = {
        let mut state = state.lock().expect("no thread panicked");
        route(&request, &mut state, own, storage)
    };
    let mut stream = stream;
    write!(stream, "HTTP/1.1 {} X\r\nConnection: close\r\nContent-Length: {}\r\n", answer.status, answer.body.len())?;
    for (name, value) in &answer.headers {
        write!(stream, "{name}: {value}\r\n")?;
    }
    stream.write_all(b"\r\n")?;
    if request.method != "HEAD" {
        stream.write_all(&answer.body[..answer.cut])?;
    }
    stream.flush()
}

fn read_request(reader: &mut impl BufRead, state: &Mutex<State>, is_hub: bool) -> std::io::Result<Request> {
    let mut first = String::new();
    reader.read_line(&mut first)?;
    let mut words = first.split_whitespace();
    let (method, target) = (words.next().unwrap_or_default(), words.next().unwrap_or_default());
    let (path, query) = target.split_once('?').unwrap_or((target, ""));
    let (mut range, mut token) = (None, None);
    loop {
        let mut line = String::new();
        if reader.read_line(&mut line)? == 0 || line.trim().is_empty() {
            break;
        }
        let (name, value) = line.trim().split_once(": ").unwrap_or(("", ""));
        match name.to_ascii_lowercase().as_str() {
            "range" => range = value.strip_prefix("bytes=").and_then(|r| r.strip_suffix('-')?.parse().ok()),
            "authorization" => token = Some(value.to_owned()),
            _ => {}
        }
    }
    let place = if is_hub { "hub" } else { "storage" };
    let range_text = range.map(|start: u64| format!(" from {start}")).unwrap_or_default();
    let token_text = token.map(|token| format!(" with {token}")).unwrap_or_default();
    let line = format!("{place} {method} {path}{range_text}{token_text}");
    state.lock().expect("no thread panicked").log.push(line);
    Ok(Request { method: method.to_owned(), path: path.to_owned(), query: query.to_owned(), range })
}

fn route(request: &Request, state: &mut State, own: SocketAddr, storage: Option<SocketAddr>) -> Answer {
    let path = request.path.trim_start_matches('/').replace("%2F", "/").replace("%20", " ");
    if let Some(rest) = path.strip_prefix("api/") {
        return api(rest, request, state, own);
    }
    if let Some(rest) = path.strip_prefix("storage/") {
        let (repository, file) = rest.split_once("//").unwrap_or_default();
        let Some(served) = state.repositories.get(repository).and_then(|files| files.get(file)).cloned() else {
            return Answer::error(404, "");
        };
        return content(request, file, &served, state, Vec::new());
    }
    let (repository, file) = path.split_once(&format!("/resolve/{COMMIT}/")).unwrap_or_default();
    let plural = if repository.starts_with("datasets/") { "" } else { "models/" };
    let repository = format!("{plural}{repository}");
    if let Some((status, code)) = state.refuse {
        return Answer::error(status, code);
    }
    let Some(served) = state.repositories.get(&repository).and_then(|files| files.get(file)).cloned() else {
        return Answer::error(404, "EntryNotFound");
    };
    let mut headers = vec![("X-Repo-Commit", COMMIT.to_owned())];
    match storage.filter(|_| served.large) {
        Some(storage) => {
            headers.push(("X-Linked-Etag", format!("\"{}\"", etag_of(&served))));
            headers.push(("X-Linked-Size", served.bytes.len().to_string()));
            headers.push(("Location", format!("http://{storage}/storage/{repository}//{file}")));
            Answer::new(302, headers, Vec::new())
        }
        None => {
            headers.push(("ETag", format!("\"{}\"", etag_of(&served))));
            content(request, file, &served, state, headers)
        }
    }
}

/// `models/org/name/revision/REV` and `models/org/name/tree/COMMIT[/DIR]`.
fn api(path: &str, request: &Request, state: &State, own: SocketAddr) -> Answer {
    let parts: Vec<&str> = path.splitn(5, '/').collect();
    let [plural, owner, name, what, rest] = parts[..] else { return Answer::error(404, "RepoNotFound") };
    let Some(files) = state.repositories.get(&format!("{plural}/{owner}/{name}")) else {
        return Answer::error(401, "RepoNotFound");
    };
    if what == "revision" {
        let commit = state.commit.as_deref().unwrap_or(COMMIT);
        return match rest {
            "main" | "refs/pr/1" | COMMIT => {
                Answer::new(200, Vec::new(), format!("{{\"id\":\"{owner}/{name}\",\"sha\":\"{commit}\"}}").into_bytes())
            }
            _ => Answer::error(404, "RevisionNotFound"),
        };
    }
    let directory = rest.split_once('/').map(|(_, directory)| format!("{directory}/")).unwrap_or_default();
    let below: Vec<(&String, &Served)> = files.iter().filter(|(path, _)| path.starts_with(&directory)).collect();
    if below.is_empty() {
        return Answer::error(404, "EntryNotFound");
    }
    let start = request.query.split('&').find_map(|pair| pair.strip_prefix("cursor=")?.parse().ok()).unwrap_or(0);
    let entries: Vec<String> = below.iter().skip(start).take(PAGE).map(|(path, file)| entry(path, file)).collect();
    let mut headers = Vec::new();
    if start + PAGE < below.len() {
        let next = format!("<http://{own}{}?recursive=true&cursor={}>; rel=\"next\"", request.path, start + PAGE);
        headers.push(("Link", next));
    }
    Answer::new(200, headers, format!("[{}]", entries.join(",")).into_bytes())
}

fn entry(path: &str, file: &Served) -> String {
    let size = file.bytes.len();
    let lfs = if file.large {
        format!(",\"lfs\":{{\"oid\":\"{}\",\"size\":{size},\"pointerSize\":130}}", etag_of(file))
    } else {
        String::new()
    };
    format!("{{\"type\":\"file\",\"oid\":\"00\",\"size\":{size},\"path\":\"{path}\"{lfs}}}")
}

fn content(
    request: &Request,
    file: &str,
    served: &Served,
    state: &mut State,
    mut headers: Vec<(&'static str, String)>,
) -> Answer {
    let fault = match request.method.as_str() {
        "GET" => state.faults.get_mut(file).and_then(VecDeque::pop_front),
        _ => None,
    };
    let mut bytes = served.bytes.clone();
    let mut start = request.range.unwrap_or(0) as usize;
    match fault {
        Some(Fault::Status(status, code)) => return Answer::error(status, code),
        Some(Fault::Longer) => bytes.push(0),
        Some(Fault::Corrupt) => bytes.iter_mut().for_each(|byte| *byte ^= 1),
        Some(Fault::IgnoreRange) => return Answer::new(200, headers, bytes),
        Some(Fault::WrongRange) => start += 1,
        _ => {}
    }
    if request.range.is_some_and(|from| from >= bytes.len() as u64) {
        return Answer::error(416, "");
    }
    let status = if request.range.is_some() { 206 } else { 200 };
    if status == 206 {
        headers.push(("Content-Range", format!("bytes {start}-{}/{}", bytes.len() - 1, bytes.len())));
    }
    let mut answer = Answer::new(status, headers, bytes[start..].to_vec());
    if let Some(Fault::Cut(n)) = fault {
        answer.cut = n.min(answer.body.len());
    }
    answer
}
