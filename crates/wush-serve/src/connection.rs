//! One connection, from its first byte to its end. Enters: a socket and the router. Leaves: answers, each counted with how it
//! ended.
//!
//! While it computes an answer hyper neither reads nor writes, so it would not learn that the client has gone. The socket is
//! looked at beside it: a client that has closed is let go of with all that it sent, read or not; so is one that takes nothing
//! of its answer for too long. A client that closed only its sending side is answered, but for HTTP/1.0's, which
//! cannot be asked whether it is there. Knows nothing of what is asked.

use std::convert::Infallible;
use std::io;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, ready};
use std::time::{Duration, Instant};

use axum::Router;
use axum::body::{Body, Bytes, HttpBody};
use axum::http::{Method, Request, Response, Version};
use futures::FutureExt;
use hyper::body::{Frame, Incoming, SizeHint};
use hyper::server::conn::http1;
use hyper::service::{Service, service_fn};
use hyper_util::rt::TokioIo;
use hyper_util::server::graceful::Watcher;
use hyper_util::service::TowerToHyperService;
use tokio::io::{AsyncRead, AsyncWrite, Interest, ReadBuf};
use tokio::net::TcpStream;

use crate::limits::{LAST_WORDS, SILENCE, TAKE_TIME};
use crate::metrics::{Metrics, Outcome};
use crate::stops::Stops;

/// How often a socket is looked at.
const LOOK: Duration = Duration::from_millis(100);
/// What a client that lives passes over, and what a socket that is closed answers with a reset.
const ARE_YOU_THERE: &[u8] = b"HTTP/1.1 100 Continue\r\n\r\n";

/// What a connection needs of the server.
pub(crate) struct Host {
    pub(crate) router: Router,
    pub(crate) metrics: Arc<Metrics>,
    pub(crate) stops: Arc<Stops>,
}

/// Answers one connection's requests until it ends, its client has gone, or `watcher` says to end and nothing is under way.
pub(crate) async fn converse(stream: TcpStream, http: http1::Builder, host: Arc<Host>, watcher: Watcher) {
    let line = Arc::new(Line::new(stream));
    let connection = http.serve_connection(TokioIo::new(Wire(line.clone())), service(&host, &line));
    tokio::select! {
        // hyper has answered what is no HTTP, without a body. A connection that broke concerns nobody else.
        ended = watcher.watch(connection) => if let Err(error) = ended && error.is_parse() {
            let status = if error.is_parse_too_large() { 431 } else { 400 };
            host.metrics.count_request("none", Some(status), Outcome::Answered);
        },
        () = line.gone(&host.stops) => {}
    }
}

/// The router, with every request told to its line and counted.
fn service(
    host: &Host,
    line: &Arc<Line>,
) -> impl Service<Request<Incoming>, Response = Response<Answer>, Error = Infallible, Future: Send> + use<> {
    let (router, metrics, line) = (TowerToHyperService::new(host.router.clone()), host.metrics.clone(), line.clone());
    service_fn(move |request: Request<Incoming>| {
        let exchange = Exchange::new(&line, &metrics, &request);
        let response = router.call(request);
        async move { Ok(exchange.answer(response.await?)) }
    })
}

/// What a connection does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    /// No request is under way.
    Idle,
    /// An answer is computed, and nothing of it is said.
    Working {
        /// Whether the client understands words before an answer: those of HTTP/1.1 do.
        may_ask: bool,
        /// When it was last asked whether it is there.
        asked: Option<Instant>,
    },
    /// An answer is being sent.
    Answering,
}

/// A socket that hyper reads and writes, and that is looked at beside it, in one task.
struct Line(Mutex<State>);

struct State {
    stream: TcpStream,
    phase: Phase,
    /// Since when the client has taken nothing of what there is to send; none when all is sent.
    blocked: Option<Instant>,
}

impl Line {
    fn new(stream: TcpStream) -> Self {
        Self(Mutex::new(State { stream, phase: Phase::Idle, blocked: None }))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Ends when the client has gone or takes nothing any more; at a server's end also when it has begun a request and does
    /// not go on.
    async fn gone(&self, stops: &Stops) {
        let mut idle_since = None;
        loop {
            tokio::time::sleep(LOOK).await;
            let mut state = self.state();
            let waits = stops.is_set() && state.phase == Phase::Idle && state.blocked.is_none();
            idle_since = if waits { idle_since.or_else(|| Some(Instant::now())) } else { None };
            let most = if stops.is_set() { LAST_WORDS } else { TAKE_TIME };
            let is_over = |since: Option<Instant>| since.is_some_and(|since: Instant| since.elapsed() > most);
            if is_over(idle_since) || is_over(state.blocked) || state.is_closed() {
                return;
            }
        }
    }
}

impl State {
    /// Whether nobody is at the other end. A client that has closed its sending side may still read, and one that has sent
    /// more than is read may have closed behind that: both are asked.
    fn is_closed(&mut self) -> bool {
        let interest = Interest::READABLE | Interest::WRITABLE | Interest::ERROR;
        let ready = match self.stream.ready(interest).now_or_never() {
            None => return false,
            Some(Err(_)) => return true,
            Some(Ok(ready)) => ready,
        };
        if ready.is_write_closed() || ready.is_error() {
            return true;
        }
        // Who is sent something is asked by that; and hyper sees the end of what is idle.
        let Phase::Working { may_ask, asked } = &mut self.phase else { return false };
        let is_unread = matches!(self.stream.peek(&mut [0]).now_or_never(), Some(Ok(1)));
        if !*may_ask || !(ready.is_read_closed() || is_unread) {
            return ready.is_read_closed();
        }
        // What hyper has not sent of the last answer must not be cut in two.
        let is_asked = asked.is_some_and(|asked| asked.elapsed() < SILENCE);
        if is_asked || self.blocked.is_some() {
            return false;
        }
        *asked = Some(Instant::now());
        match self.stream.try_write(ARE_YOU_THERE) {
            Ok(n) => n < ARE_YOU_THERE.len(),
            Err(error) => error.kind() != io::ErrorKind::WouldBlock,
        }
    }
}

/// A line as hyper sees it.
struct Wire(Arc<Line>);

impl Wire {
    fn written(&self, write: impl FnOnce(Pin<&mut TcpStream>) -> Poll<io::Result<usize>>) -> Poll<io::Result<usize>> {
        let mut state = self.0.state();
        let written = write(Pin::new(&mut state.stream));
        match written {
            Poll::Pending => drop(state.blocked.get_or_insert_with(Instant::now)),
            Poll::Ready(_) => state.blocked = None,
        }
        written
    }
}

impl AsyncRead for Wire {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0.state().stream).poll_read(cx, buf)
    }
}

impl AsyncWrite for Wire {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        self.written(|stream| stream.poll_write(cx, bytes))
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.written(|stream| stream.poll_write_vectored(cx, slices))
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0.state().stream).poll_flush(cx)
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0.state().stream).poll_shutdown(cx)
    }
}

/// A request under way, from its head to the last of its answer; counted when it is dropped.
struct Exchange {
    line: Arc<Line>,
    metrics: Arc<Metrics>,
    endpoint: &'static str,
    came: Instant,
    status: Option<u16>,
    /// Whether its answer has no body to send.
    is_head: bool,
    outcome: Outcome,
}

impl Exchange {
    fn new<B>(line: &Arc<Line>, metrics: &Arc<Metrics>, request: &Request<B>) -> Self {
        line.state().phase = Phase::Working { may_ask: request.version() >= Version::HTTP_11, asked: None };
        Self {
            line: line.clone(),
            metrics: metrics.clone(),
            endpoint: endpoint(request.uri().path()),
            came: Instant::now(),
            status: None,
            is_head: request.method() == Method::HEAD,
            outcome: Outcome::Cancelled,
        }
    }

    fn answer(mut self, response: Response<Body>) -> Response<Answer> {
        self.line.state().phase = Phase::Answering;
        self.status = Some(response.status().as_u16());
        response.map(|body| {
            let mut answer = Answer { body, exchange: self };
            answer.look();
            answer
        })
    }
}

impl Drop for Exchange {
    fn drop(&mut self) {
        self.line.state().phase = Phase::Idle;
        self.metrics.count_request(self.endpoint, self.status, self.outcome);
        if self.outcome == Outcome::Answered && matches!(self.endpoint, "completions" | "chat") {
            self.metrics.request.observe(self.came.elapsed());
        }
    }
}

/// A request's endpoint as it is counted.
fn endpoint(path: &str) -> &'static str {
    match path {
        "/health" => "health",
        "/metrics" => "metrics",
        "/v1/completions" => "completions",
        "/v1/chat/completions" => "chat",
        path if path.starts_with("/v1/models") => "models",
        _ => "other",
    }
}

/// An answer's body, which knows when hyper has all of it.
struct Answer {
    body: Body,
    exchange: Exchange,
}

impl Answer {
    fn look(&mut self) {
        if self.exchange.is_head || self.body.is_end_stream() {
            self.exchange.outcome = Outcome::Answered;
        }
    }
}

impl HttpBody for Answer {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        let frame = ready!(Pin::new(&mut self.body).poll_frame(cx));
        if frame.is_none() {
            self.exchange.outcome = Outcome::Answered;
        }
        self.look();
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::TcpListener;

    use super::*;

    /// Both ends of a connection, the second as a line in a phase.
    async fn pair(phase: Phase) -> (TcpStream, Line) {
        let listener = TcpListener::bind(("127.0.0.1", 0)).await.expect("a port");
        let address = listener.local_addr().expect("bound");
        let (client, accepted) = tokio::join!(TcpStream::connect(address), listener.accept());
        let line = Line::new(accepted.expect("accepted").0);
        line.state().phase = phase;
        (client.expect("connected"), line)
    }

    async fn is_gone(line: &Line) -> bool {
        tokio::time::timeout(LOOK * 8, line.gone(&Stops::default())).await.is_ok()
    }

    fn run(test: impl Future<Output = ()>) {
        tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime").block_on(test);
    }

    #[test]
    fn who_closes_is_gone_and_who_only_stops_sending_is_not() {
        run(async {
            let working = Phase::Working { may_ask: true, asked: None };
            let (client, line) = pair(working).await;
            assert!(!is_gone(&line).await, "it waits for an answer");
            drop(client);
            assert!(is_gone(&line).await);

            // Much that nobody has read changes nothing, even where the end is behind what no buffer holds.
            for n_bytes in [1, 50_000, 50_000_000] {
                let (mut client, line) = pair(working).await;
                let _ = tokio::time::timeout(LOOK, client.write_all(&vec![b'x'; n_bytes])).await;
                drop(client);
                assert!(is_gone(&line).await, "{n_bytes} bytes");
            }

            let (mut client, line) = pair(working).await;
            client.shutdown().await.expect("shut");
            assert!(!is_gone(&line).await);
            let mut asked = vec![0; ARE_YOU_THERE.len()];
            client.read_exact(&mut asked).await.expect("asked");
            assert_eq!(asked, ARE_YOU_THERE);
            drop(client);
        });
    }

    /// HTTP/1.0 has no words before an answer, and an answer under way must not be cut in two.
    #[test]
    fn who_must_not_be_asked_is_not() {
        run(async {
            let without_words = Phase::Working { may_ask: false, asked: None };
            let asked = Phase::Working { may_ask: true, asked: Some(Instant::now()) };
            for phase in [Phase::Idle, Phase::Answering, asked, without_words] {
                let (mut client, line) = pair(phase).await;
                client.shutdown().await.expect("shut");
                assert_eq!(is_gone(&line).await, phase == without_words, "{phase:?}");
                drop(line);
                let mut found = Vec::new();
                client.read_to_end(&mut found).await.expect("closed");
                assert!(found.is_empty(), "{phase:?}");
            }
        });
    }

    #[test]
    fn a_server_that_stops_waits_neither_for_readers_nor_for_writers() {
        run(async {
            let stops = Stops::default();
            let (_client, line) = pair(Phase::Idle).await;
            let patience = LAST_WORDS + LOOK * 8;
            assert!(tokio::time::timeout(patience, line.gone(&stops)).await.is_err(), "it does not stop");
            stops.set();
            assert!(tokio::time::timeout(patience, line.gone(&stops)).await.is_ok());

            let (_client, line) = pair(Phase::Answering).await;
            assert!(tokio::time::timeout(patience, line.gone(&stops)).await.is_err(), "an answer is under way");
            line.state().blocked = Some(Instant::now());
            assert!(tokio::time::timeout(patience, line.gone(&stops)).await.is_ok(), "nobody takes it");
        });
    }
}
