//! The main path, from an address to an orderly end: listen, start the engine's thread, take connections until asked to stop,
//! let requests end, and end. Read from [`serve`] down.

use std::collections::BTreeSet;
use std::net::{SocketAddr, TcpListener};
use std::pin::pin;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use hyper::server::conn::http1;
use hyper_util::rt::TokioTimer;
use hyper_util::server::graceful::GracefulShutdown;
use tokio::runtime::{Builder, Runtime};
use tokio::sync::Semaphore;
use wush_checkpoint::chat::ChatTemplate;
use wush_checkpoint::tokenizer::TextTokenizer;
use wush_format::monitor::Monitor;
use wush_generate::Batch;
use wush_runtime::CacheConfig;

use crate::auth::ApiKey;
use crate::connection::{Host, converse};
use crate::engine::{Engine, Message};
use crate::error::{Result, ServeError};
use crate::limits::{HEAD_TIME, LAST_WORDS, Limits, MAX_BUFFER_BYTES, MAX_CONNECTIONS, MAX_LARGE_BODIES};
use crate::metrics::Metrics;
use crate::plan::fresh_seed;
use crate::prompts::Shape;
use crate::reply::now;
use crate::routes::{App, router};
use crate::stops::Stops;
use crate::vocabulary::Vocabulary;

/// Threads that answer; the engine's work runs on the process's pool.
const ANSWERING_THREADS: usize = 2;
/// How often the server looks whether it is to stop.
const WATCH: Duration = Duration::from_millis(50);
/// Pause after the system had no room for a connection.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// What is served.
pub struct Served<'a> {
    /// The model's name in answers, and what else requests may call it.
    pub names: Vec<String>,
    /// Decoder and cache, without sequences.
    pub batch: Batch<'a>,
    /// What the cache was made for.
    pub config: CacheConfig,
    /// Text to token ids and back.
    pub tokenizer: TextTokenizer,
    /// Of chats; without it they are refused.
    pub template: Option<ChatTemplate>,
    /// Tokens that end a text.
    pub ends: BTreeSet<u32>,
}

/// How it is served.
#[derive(Debug, Clone)]
pub struct Settings {
    /// Where to listen; port 0 takes any that is free.
    pub address: SocketAddr,
    /// What clients must send.
    pub key: Option<ApiKey>,
    /// Bounds.
    pub limits: Limits,
}

/// What a server did.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Summary {
    /// HTTP requests.
    pub requests: u64,
    /// Tokens of prompts that were computed.
    pub prompt_tokens: u64,
    /// Tokens of prompts that a kept prefix had.
    pub reused_tokens: u64,
    /// Tokens generated.
    pub generated_tokens: u64,
    /// Sequences that nobody waited for any more.
    pub cancelled: u64,
    /// Bytes that the cache held after the last sequence: 0.
    pub cache_bytes_left: u64,
    /// Time that it served.
    pub seconds: f64,
}

/// Serves until `monitor` is interrupted, and then as long as requests take to end, at most the grace of the limits. What is not
/// done then is told so.
///
/// # Errors
/// `Bind`, `Threads`; `Panicked`.
pub fn serve(served: Served<'_>, settings: Settings, monitor: &dyn Monitor) -> Result<Summary> {
    let clock = Instant::now();
    let Settings { address, key, limits } = settings;
    let (listener, address) = listen(address)?;
    let runtime = Builder::new_multi_thread().worker_threads(ANSWERING_THREADS).enable_all().build();
    let runtime = runtime.map_err(ServeError::Threads)?;
    let (engine, incoming) = mpsc::channel();
    let Served { names, batch, config, tokenizer, template, ends } = served;
    let metrics = Arc::new(Metrics::default());
    let app = Arc::new(App {
        names,
        vocabulary: Vocabulary::new(tokenizer),
        template,
        shape: Shape { spec: batch.spec().clone(), config: config.clone(), limits },
        key,
        engine,
        places: Arc::new(Semaphore::new(limits.max_sequences().min(Semaphore::MAX_PERMITS))),
        encoders: App::turns(),
        bodies: Arc::new(Semaphore::new(MAX_LARGE_BODIES)),
        metrics: metrics.clone(),
        stops: Arc::default(),
        is_over: Arc::default(),
        number: AtomicU64::new(fresh_seed()),
        started: now(),
    });
    monitor.note(&format!("listening  on http://{address}"));
    let cache_bytes_left = std::thread::scope(|scope| {
        let stops = app.stops.clone();
        let engine = Engine::new((batch, config), limits, ends, incoming, metrics.clone());
        let thread = std::thread::Builder::new().name("engine".to_owned());
        let thread = thread.spawn_scoped(scope, move || {
            let _stops = StopsAtEnd(stops);
            engine.run()
        });
        let thread = thread.map_err(ServeError::Threads)?;
        answer(&runtime, listener, &app, monitor);
        // What is left of requests ends with their threads, and the engine as it is told.
        let _ = app.engine.send(Message::End);
        runtime.shutdown_timeout(LAST_WORDS);
        thread.join().map_err(|_| ServeError::Panicked)
    })?;
    Ok(Summary {
        requests: metrics.n_requests(),
        prompt_tokens: metrics.n_prompt_tokens.get(),
        reused_tokens: metrics.n_reused_tokens.get(),
        generated_tokens: metrics.n_generated_tokens.get(),
        cancelled: metrics.n_cancelled.get(),
        cache_bytes_left: cache_bytes_left as u64,
        seconds: clock.elapsed().as_secs_f64(),
    })
}

/// Tells all others when the engine ends, even by a panic.
struct StopsAtEnd(Arc<Stops>);

impl Drop for StopsAtEnd {
    fn drop(&mut self) {
        self.0.set();
    }
}

/// A listener, and where it listens.
fn listen(address: SocketAddr) -> Result<(TcpListener, SocketAddr)> {
    let bind = || {
        let listener = TcpListener::bind(address)?;
        listener.set_nonblocking(true)?;
        let bound = listener.local_addr()?;
        Ok((listener, bound))
    };
    bind().map_err(|source| ServeError::Bind { address, source })
}

/// Answers until asked to stop, then lets requests end.
fn answer(runtime: &Runtime, listener: TcpListener, app: &Arc<App>, monitor: &dyn Monitor) {
    runtime.block_on(async {
        let connections = GracefulShutdown::new();
        let (metrics, stops) = (app.metrics.clone(), app.stops.clone());
        let host = Arc::new(Host { router: router(app.clone()), metrics, stops });
        tokio::select! {
            () = accept(listener, host, &connections) => {}
            () = asked_to_stop(monitor) => {}
            () = app.stops.wait() => {}
        }
        app.stops.set();
        let _ = app.engine.send(Message::Drain);
        let mut ended = pin!(connections.shutdown());
        if tokio::time::timeout(app.shape.limits.grace, &mut ended).await.is_err() {
            // The engine looks between its rounds, and some are long: who waits is told now.
            let _ = app.engine.send(Message::End);
            app.is_over.set();
            let _ = tokio::time::timeout(LAST_WORDS, &mut ended).await;
        }
    });
}

/// Takes connections, so many at once and no more, each with time to send a request's head.
async fn accept(listener: TcpListener, host: Arc<Host>, connections: &GracefulShutdown) {
    let Ok(listener) = tokio::net::TcpListener::from_std(listener) else { return };
    let places = Arc::new(Semaphore::new(MAX_CONNECTIONS));
    let mut http = http1::Builder::new();
    http.timer(TokioTimer::new()).header_read_timeout(HEAD_TIME).max_buf_size(MAX_BUFFER_BYTES);
    // Who has sent a request may close that side, and is answered.
    http.half_close(true);
    loop {
        let Ok(place) = places.clone().acquire_owned().await else { return };
        let Ok((stream, _)) = listener.accept().await else {
            // No room for another file descriptor, or a client that went away at once.
            tokio::time::sleep(ACCEPT_PAUSE).await;
            continue;
        };
        // Tokens are small and must not wait for each other.
        let _ = stream.set_nodelay(true);
        let conversation = converse(stream, http.clone(), host.clone(), connections.watcher());
        tokio::spawn(async move {
            conversation.await;
            drop(place);
        });
    }
}

async fn asked_to_stop(monitor: &dyn Monitor) {
    while !monitor.interrupted() {
        tokio::time::sleep(WATCH).await;
    }
}
