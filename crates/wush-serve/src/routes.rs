//! The endpoints. Enters: HTTP requests. Leaves: answers, whole or as server-sent events. A request's way: key, body, plan, engine,
//! text.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Instant;

use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::{Path, Request, State};
use axum::http::{StatusCode, header};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use futures::stream::poll_fn;
use serde_json::{Value, json};
use tokio::sync::mpsc::{Sender, UnboundedReceiver, channel, unbounded_channel};
use tokio::sync::{Semaphore, oneshot};
use wush_checkpoint::chat::ChatTemplate;

use crate::auth::ApiKey;
use crate::body::read_body;
use crate::engine::{Census, Finish, Job, Message, Told};
use crate::error::ApiError;
use crate::limits::{CENSUS_TIME, LARGE_BODY_BYTES, MAX_ENCODERS, SILENCE};
use crate::metrics::Metrics;
use crate::plan::{self, Options, no_model};
use crate::prompts::{self, Encoded, Prompt, Shape};
use crate::reply::{Form, Heading, Piece, Usage};
use crate::stops::Stops;
use crate::text::{Delta, Writer, prompt_entries};
use crate::vocabulary::Vocabulary;

/// Pieces of a stream that wait for a slow reader; more wait as tokens.
const PIECES_AHEAD: usize = 16;
/// A comment among server-sent events, which clients pass over.
const WAITING: &[u8] = b": waiting\n\n";

/// What all requests share.
pub(crate) struct App {
    /// The model's name, and what else it may be called.
    pub(crate) names: Vec<String>,
    pub(crate) vocabulary: Vocabulary,
    pub(crate) template: Option<ChatTemplate>,
    pub(crate) shape: Shape,
    pub(crate) key: Option<ApiKey>,
    pub(crate) engine: std::sync::mpsc::Sender<Message>,
    /// Sequences that may still come.
    pub(crate) places: Arc<Semaphore>,
    pub(crate) encoders: Arc<Semaphore>,
    pub(crate) metrics: Arc<Metrics>,
    /// Bodies that are no small ones, and read.
    pub(crate) bodies: Arc<Semaphore>,
    /// Whether the server was asked to stop, or the engine is gone.
    pub(crate) stops: Arc<Stops>,
    /// Whether the time is over that requests had to end in.
    pub(crate) is_over: Arc<Stops>,
    pub(crate) number: AtomicU64,
    /// When the server started, seconds since 1970.
    pub(crate) started: u64,
}

type Shared = State<Arc<App>>;

/// All endpoints.
pub(crate) fn router(app: Arc<App>) -> Router {
    let router = Router::new()
        .route("/health", get(health))
        .route("/metrics", get(metrics))
        .route("/v1/models", get(models))
        .route("/v1/models/{*name}", get(model))
        .route("/v1/completions", post(completions))
        .route("/v1/chat/completions", post(chat_completions))
        .fallback(|| async { ApiError::new(StatusCode::NOT_FOUND, "not_found", "no such endpoint") })
        .method_not_allowed_fallback(|| async {
            ApiError::new(StatusCode::METHOD_NOT_ALLOWED, "method_not_allowed", "this endpoint has another method")
        });
    router.layer(middleware::from_fn_with_state(app.clone(), guard)).with_state(app)
}

/// Before every endpoint: the key.
async fn guard(State(app): Shared, request: Request, next: Next) -> Response {
    let sent = request.headers().get(header::AUTHORIZATION).and_then(|value| value.to_str().ok());
    let is_let_in = request.uri().path() == "/health" || app.key.as_ref().is_none_or(|key| key.is_in(sent));
    if is_let_in {
        return next.run(request).await;
    }
    let message = "the request has no valid key: send Authorization: Bearer KEY";
    ApiError::new(StatusCode::UNAUTHORIZED, "invalid_api_key", message).into_response()
}

async fn health(State(app): Shared) -> Response {
    if app.stops.is_set() {
        return ApiError::stopping().into_response();
    }
    json_response(&json!({ "status": "ok" }))
}

async fn metrics(State(app): Shared) -> Response {
    let text = app.metrics.text(app.census().await, app.shape.limits.max_cache_bytes);
    ([(header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")], text).into_response()
}

async fn models(State(app): Shared) -> Response {
    json_response(&json!({ "object": "list", "data": [app.model_card()] }))
}

async fn model(State(app): Shared, Path(name): Path<String>) -> Result<Response, ApiError> {
    if !app.names.contains(&name) {
        return Err(no_model(&app.names));
    }
    Ok(json_response(&app.model_card()))
}

async fn completions(State(app): Shared, request: Request) -> Result<Response, ApiError> {
    let body = read_body(request, app.shape.limits.max_body_bytes, &app.bodies, &app.stops).await?;
    let (app, prompts, options) = encoding(app, body.bytes.len(), move |app| {
        let (prompts, options) = plan::completion(&body.bytes, &app.names)?;
        let prompts = prompts.encode(&app.vocabulary.tokenizer, &app.shape, &options)?;
        app.prompts("prompt", prompts, options)
    })
    .await?;
    answer(app, Form::Completion, prompts, options).await
}

async fn chat_completions(State(app): Shared, request: Request) -> Result<Response, ApiError> {
    let body = read_body(request, app.shape.limits.max_body_bytes, &app.bodies, &app.stops).await?;
    let (app, prompts, options) = encoding(app, body.bytes.len(), move |app| {
        let (messages, options) = plan::chat(&body.bytes, &app.names)?;
        let Some(template) = &app.template else {
            let message = "the model has no chat template: send text to /v1/completions";
            return Err(ApiError { code: "no_chat_template", ..ApiError::invalid("messages", message) });
        };
        let prompt = prompts::encode_chat(template, &app.vocabulary.tokenizer, &app.shape, &messages)?;
        app.prompts("messages", vec![prompt], options)
    })
    .await?;
    answer(app, Form::Chat, prompts, options).await
}

/// Runs `work` on a body of `n_bytes`, which takes a core's time and memory, beside the threads that answer; so much of it at
/// once, and no more.
async fn encoding<T: Send + 'static, U: Send + 'static>(
    app: Arc<App>,
    n_bytes: usize,
    work: impl FnOnce(&App) -> Result<(T, U), ApiError> + Send + 'static,
) -> Result<(Arc<App>, T, U), ApiError> {
    let n_turns = if n_bytes > LARGE_BODY_BYTES { MAX_ENCODERS } else { 1 };
    let turn = app.encoders.clone().acquire_many_owned(n_turns).await.map_err(|_| ApiError::stopping())?;
    let shared = app.clone();
    // A client that goes away ends this future and not the work: the turn is the work's.
    let run = move || {
        let done = work(&shared);
        drop(turn);
        done
    };
    let done = tokio::task::spawn_blocking(run).await;
    let (prompts, options) = done.map_err(|_| ApiError::internal("a thread panicked"))??;
    Ok((app, prompts, options))
}

impl App {
    /// Encoders' turns.
    pub(crate) fn turns() -> Arc<Semaphore> {
        Arc::new(Semaphore::new(MAX_ENCODERS as usize))
    }

    /// What the cache holds; none where the engine does not say so in time: it answers between its rounds.
    async fn census(&self) -> Option<Census> {
        let (reply, census) = oneshot::channel();
        self.engine.send(Message::Census(reply)).ok()?;
        tokio::time::timeout(CENSUS_TIME, census).await.ok()?.ok()
    }

    fn model_card(&self) -> Value {
        let (id, created, longest) = (&self.names[0], self.started, self.shape.longest());
        json!({ "id": id, "object": "model", "created": created, "owned_by": "wush", "max_model_len": longest })
    }

    /// What was sent as `field`, checked.
    fn prompts(
        &self,
        field: &'static str,
        prompts: Vec<Encoded>,
        options: Options,
    ) -> Result<(Vec<Prompt>, Options), ApiError> {
        let checked = prompts.into_iter().map(|prompt| self.shape.prompt(prompt, options.max_new, field));
        let prompts = checked.collect::<Result<Vec<_>, _>>()?;
        prompts::check_scores(&prompts, &options)?;
        Ok((prompts, options))
    }

    /// Hands prompts to the engine, all or none.
    fn submit(&self, prompts: &[Prompt], options: &Options) -> Result<Answer, ApiError> {
        if self.stops.is_set() {
            return Err(ApiError::stopping());
        }
        let most = self.shape.limits.max_sequences();
        if prompts.len() > most {
            let message = format!("{} prompts, this server takes {most} at most at once", prompts.len());
            return Err(ApiError::invalid("prompt", message));
        }
        let full = || {
            let message = "too many requests wait already: try again later";
            ApiError::new(StatusCode::TOO_MANY_REQUESTS, "queue_full", message)
        };
        let places = prompts.iter().map(|_| self.places.clone().try_acquire_owned().map_err(|_| full()));
        let places = places.collect::<Result<Vec<_>, _>>()?;
        let (told, events) = unbounded_channel();
        let enough: Vec<Arc<AtomicBool>> = prompts.iter().map(|_| Arc::default()).collect();
        let came = Instant::now();
        let jobs = prompts.iter().zip(places).zip(&enough).enumerate().map(|(index, ((prompt, place), enough))| Job {
            index,
            ids: prompt.ids.clone(),
            max_new: prompt.max_new,
            sampler: options.sampler_of(index),
            n_top: options.n_top,
            scores_prompt: options.echoes && options.n_top.is_some(),
            ignores_end: options.ignores_end,
            n_bytes: prompt.n_bytes,
            told: told.clone(),
            enough: enough.clone(),
            came,
            place,
        });
        self.engine.send(Message::Jobs(jobs.collect())).map_err(|_| ApiError::stopping())?;
        Ok(Answer { events, enough })
    }
}

/// An answer that the engine works on. When it is dropped, the work ends.
struct Answer {
    events: UnboundedReceiver<(usize, Told)>,
    /// One a prompt: set when its text has ended before the engine says so.
    enough: Vec<Arc<AtomicBool>>,
}

async fn answer(app: Arc<App>, form: Form, prompts: Vec<Prompt>, options: Options) -> Result<Response, ApiError> {
    let heading = Heading::new(form, app.number.fetch_add(1, Ordering::Relaxed), &app.names[0]);
    let answer = app.submit(&prompts, &options)?;
    if !options.streams {
        return whole(&app, &heading, answer, &prompts, &options).await;
    }
    let (pieces, mut ready) = channel(PIECES_AHEAD);
    tokio::spawn(async move { stream(&app, &heading, answer, (&prompts, &options), pieces).await });
    let body = Body::from_stream(poll_fn(move |context| {
        ready.poll_recv(context).map(|piece: Option<Bytes>| piece.map(Ok::<_, std::convert::Infallible>))
    }));
    let headers = [(header::CONTENT_TYPE, "text/event-stream"), (header::CACHE_CONTROL, "no-cache")];
    Ok((headers, body).into_response())
}

/// One answer, when all of it is there.
async fn whole(
    app: &App,
    heading: &Heading,
    answer: Answer,
    prompts: &[Prompt],
    options: &Options,
) -> Result<Response, ApiError> {
    let mut texts = Texts::new(app, prompts, options, answer);
    let mut whole: Vec<Piece> = (0..prompts.len()).map(|index| Piece { index, ..Piece::default() }).collect();
    while let Some(piece) = texts.next().await? {
        let of = &mut whole[piece.index];
        of.text += &piece.text;
        if let Some(entries) = piece.entries {
            of.entries.get_or_insert_default().extend(entries);
        }
        of.finish = of.finish.or(piece.finish);
    }
    Ok(json_response(&heading.whole(whole, texts.usage)))
}

/// Pieces as they come, until the end or until nobody reads.
async fn stream(
    app: &App,
    heading: &Heading,
    answer: Answer,
    (prompts, options): (&[Prompt], &Options),
    pieces: Sender<Bytes>,
) {
    let mut texts = Texts::new(app, prompts, options, answer);
    let told = async {
        if let Some(opening) = heading.opening() {
            tell(&pieces, &opening).await?;
        }
        loop {
            match tokio::time::timeout(SILENCE, texts.next()).await {
                Ok(Ok(Some(piece))) if piece.is_empty() => {}
                Ok(Ok(Some(piece))) => tell(&pieces, &heading.piece(piece)).await?,
                Ok(Ok(None)) => break,
                Ok(Err(error)) => return tell(&pieces, &error.body()).await,
                Err(_) => pieces.send(Bytes::from_static(WAITING)).await.ok()?,
            }
        }
        if options.tells_usage {
            tell(&pieces, &heading.usage_piece(texts.usage)).await?;
        }
        Some(())
    };
    tokio::select! {
        told = told => if told.is_some() {
            let _ = pieces.send(Bytes::from_static(b"data: [DONE]\n\n")).await;
        },
        () = pieces.closed() => {}
    }
}

/// One server-sent event; none when nobody reads.
async fn tell(pieces: &Sender<Bytes>, value: &Value) -> Option<()> {
    pieces.send(format!("data: {value}\n\n").into()).await.ok()
}

/// The texts of an answer, from what the engine tells.
struct Texts<'a> {
    app: &'a App,
    prompts: &'a [Prompt],
    options: &'a Options,
    answer: Answer,
    /// None for a text that has ended.
    writers: Vec<Option<Writer<'a>>>,
    usage: Usage,
}

impl<'a> Texts<'a> {
    fn new(app: &'a App, prompts: &'a [Prompt], options: &'a Options, answer: Answer) -> Self {
        let writer = |prompt: &'a Prompt| {
            let n_chars = if options.echoes { prompt.text.chars().count() } else { 0 };
            Some(Writer::new(&app.vocabulary, &prompt.ids, n_chars, &options.stops))
        };
        let n_prompt = prompts.iter().map(|prompt| prompt.ids.len()).sum();
        let usage = Usage { n_prompt, ..Usage::default() };
        Self { app, prompts, options, answer, writers: prompts.iter().map(writer).collect(), usage }
    }

    /// What comes next; none when every text has ended.
    async fn next(&mut self) -> Result<Option<Piece>, ApiError> {
        while self.writers.iter().any(Option::is_some) {
            // The engine tells the end of everything, unless it is gone, or reads a long prompt when time is over.
            let told = tokio::select! {
                biased;
                told = self.answer.events.recv() => told,
                () = self.app.is_over.wait() => None,
            };
            let (index, told) = told.ok_or_else(ApiError::stopping)?;
            if self.writers[index].is_some()
                && let Some(piece) = self.piece(index, told)?
            {
                return Ok(Some(piece));
            }
        }
        Ok(None)
    }

    fn piece(&mut self, index: usize, told: Told) -> Result<Option<Piece>, ApiError> {
        let failed = |error: wush_checkpoint::CheckpointError| ApiError::internal(error.to_string());
        let scores = self.options.n_top.is_some();
        let (delta, finish) = match told {
            Told::Prompt { n_reused, scored } => {
                self.usage.n_reused += n_reused;
                if !self.options.echoes {
                    return Ok(None);
                }
                let Prompt { ids, text, n_added, .. } = &self.prompts[index];
                let entries = match scores {
                    true => prompt_entries(&self.app.vocabulary, ids, *n_added, scored).map_err(failed)?,
                    false => Vec::new(),
                };
                (Delta { text: text.clone(), entries, is_stopped: false }, None)
            }
            Told::Token { id, scored } => {
                self.usage.n_new += 1;
                let writer = self.writers[index].as_mut().expect("looked at by next");
                let delta = writer.push(id, scored).map_err(failed)?;
                let finish = delta.is_stopped.then_some(Finish::Stop);
                (delta, finish)
            }
            Told::End(finish) => {
                let writer = self.writers[index].take().expect("looked at by next");
                let delta = writer.finish().map_err(failed)?;
                let finish = if delta.is_stopped { Finish::Stop } else { finish };
                (delta, Some(finish))
            }
            Told::Stopping => return Err(ApiError::stopping()),
            Told::Failed(message) => return Err(ApiError::internal(message)),
        };
        if finish.is_some() {
            self.writers[index] = None;
            self.answer.enough[index].store(true, Ordering::Relaxed);
        }
        Ok(Some(Piece { index, text: delta.text, entries: scores.then_some(delta.entries), finish }))
    }
}

fn json_response(value: &Value) -> Response {
    ([(header::CONTENT_TYPE, "application/json")], value.to_string()).into_response()
}
