//! The engine: the one thread that owns decoder and cache. Continuous batching: sequences join and leave between steps.
//!
//! Enters: jobs, each a prompt's tokens and how to go on. Leaves: tokens, one by one, to whoever asked. A round is: take what
//! came, let go of what nobody waits for, admit, one token of every answer under way (one step), then at most a chunk of
//! prompts. So an answer waits for a chunk at most, however long other prompts are. Knows no text.

use std::collections::{BTreeSet, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, TryRecvError};
use std::time::Instant;

use rayon::prelude::*;
use tokio::sync::mpsc::UnboundedSender;
use tokio::sync::{OwnedSemaphorePermit, oneshot};
use wush_generate::{Batch, GenerateError, Sampler, most_bytes};
use wush_model::cpu::Rows;
use wush_runtime::{CacheConfig, Memory, SequenceId};

use crate::limits::Limits;
use crate::metrics::Metrics;
use crate::prefix::{Prefixes, is_worth_keeping};
use crate::score::{Scored, score};

/// Rows of logits that are computed together where all of a prompt's are asked for.
const SCORED_ROWS: usize = 64;

/// One sequence to be computed.
pub(crate) struct Job {
    /// Which of its request's.
    pub(crate) index: usize,
    /// The prompt: at least one token, all of them the model's.
    pub(crate) ids: Vec<u32>,
    /// Tokens to add at most.
    pub(crate) max_new: usize,
    pub(crate) sampler: Sampler,
    /// Alternatives to list of every token; none for no log probabilities at all.
    pub(crate) n_top: Option<usize>,
    /// Whether log probabilities of the prompt's tokens are wanted, too.
    pub(crate) scores_prompt: bool,
    /// Whether the model's end of text is no end.
    pub(crate) ignores_end: bool,
    /// Bytes that it may take in the cache.
    pub(crate) n_bytes: u64,
    pub(crate) told: UnboundedSender<(usize, Told)>,
    /// Set by whoever reads the answer when it has read enough.
    pub(crate) enough: Arc<AtomicBool>,
    pub(crate) came: Instant,
    /// Its place among the server's sequences.
    pub(crate) place: OwnedSemaphorePermit,
}

impl Job {
    fn is_wanted(&self) -> bool {
        !self.told.is_closed() && !self.has_enough()
    }

    fn has_enough(&self) -> bool {
        self.enough.load(Ordering::Relaxed)
    }

    /// Who went away is noticed by [`Job::is_wanted`].
    fn tell(&self, told: Told) {
        let _ = self.told.send((self.index, told));
    }

    /// The last word. Who reads it may ask again at once, so the place is free before.
    fn end(self, told: Told) {
        let Self { index, told: reader, place, .. } = self;
        drop(place);
        let _ = reader.send((index, told));
    }
}

/// What becomes of a sequence.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Told {
    /// The prompt is read. `scored`: of its tokens but the first, where asked for.
    Prompt { n_reused: usize, scored: Vec<Scored> },
    /// One token more.
    Token { id: u32, scored: Option<Scored> },
    /// That was all.
    End(Finish),
    /// The server stops.
    Stopping,
    /// It cannot go on.
    Failed(String),
}

/// Why an answer ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Finish {
    /// The model ended it, or a stop string did.
    Stop,
    /// It has as many tokens as it may have.
    Length,
}

/// What the engine is sent.
pub(crate) enum Message {
    Jobs(Vec<Job>),
    /// What does the cache hold?
    Census(oneshot::Sender<Census>),
    /// What waits is told that the server stops; what runs may end.
    Drain,
    /// All is told that the server stops, and the engine ends.
    End,
}

/// What the cache holds.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Census {
    pub(crate) memory: Memory,
    pub(crate) n_sequences: usize,
    pub(crate) n_prefixes: usize,
    pub(crate) reserved: u64,
}

/// A job with its sequence.
struct Sequence {
    job: Job,
    id: SequenceId,
    /// Tokens of the prompt that are in the cache.
    n_fed: usize,
    n_reused: usize,
    scored: Vec<Scored>,
    n_new: usize,
    /// The token that goes in next.
    next: u32,
    /// When it was chosen.
    chosen: Instant,
}

pub(crate) struct Engine<'a> {
    batch: Batch<'a>,
    config: CacheConfig,
    limits: Limits,
    ends: BTreeSet<u32>,
    incoming: Receiver<Message>,
    metrics: Arc<Metrics>,
    waiting: VecDeque<Job>,
    prefilling: VecDeque<Sequence>,
    decoding: Vec<Sequence>,
    prefixes: Prefixes,
    stops: bool,
}

impl<'a> Engine<'a> {
    /// `config` is that of the batch's cache; `ends` are the tokens that end a text.
    pub(crate) fn new(
        (batch, config): (Batch<'a>, CacheConfig),
        limits: Limits,
        ends: BTreeSet<u32>,
        incoming: Receiver<Message>,
        metrics: Arc<Metrics>,
    ) -> Self {
        Self {
            batch,
            config,
            ends,
            incoming,
            metrics,
            waiting: VecDeque::new(),
            prefilling: VecDeque::new(),
            decoding: Vec::new(),
            prefixes: Prefixes::new(limits.max_prefixes),
            limits,
            stops: false,
        }
    }

    /// Runs until it is told to end, or nobody is left to tell. Bytes that the cache holds then: 0.
    pub(crate) fn run(mut self) -> usize {
        while self.receive() {
            self.let_go();
            self.admit();
            self.decode();
            self.prefill();
            self.metrics.set_load(self.n_running(), self.waiting.len());
        }
        self.waiting.drain(..).for_each(|job| job.end(Told::Stopping));
        for sequence in std::mem::take(&mut self.prefilling).into_iter().chain(std::mem::take(&mut self.decoding)) {
            self.end(sequence, Told::Stopping);
        }
        while self.drop_prefix() {}
        self.batch.memory().total()
    }

    fn n_running(&self) -> usize {
        self.prefilling.len() + self.decoding.len()
    }

    /// Bytes that may be taken by what runs and what is kept.
    fn reserved(&self) -> u64 {
        let running = self.prefilling.iter().chain(&self.decoding).map(|sequence| sequence.job.n_bytes);
        running.sum::<u64>() + self.prefixes.bytes()
    }

    /// Takes messages; waits for one while there is nothing to do. False at the end.
    fn receive(&mut self) -> bool {
        let is_idle = self.n_running() == 0 && self.waiting.is_empty();
        let first = if is_idle {
            self.incoming.recv().map_err(|_| TryRecvError::Disconnected)
        } else {
            self.incoming.try_recv()
        };
        let mut next = first;
        loop {
            match next {
                Ok(Message::End) | Err(TryRecvError::Disconnected) => return false,
                Ok(message) => self.take(message),
                Err(TryRecvError::Empty) => return true,
            }
            next = self.incoming.try_recv();
        }
    }

    fn take(&mut self, message: Message) {
        match message {
            Message::Jobs(jobs) if self.stops => jobs.into_iter().for_each(|job| job.end(Told::Stopping)),
            Message::Jobs(jobs) => self.waiting.extend(jobs),
            Message::Census(reply) => {
                let (memory, reserved) = (self.batch.memory(), self.reserved());
                let n_prefixes = self.prefixes.len();
                // Who asked may have gone.
                let _ = reply.send(Census { memory, n_sequences: self.n_running(), n_prefixes, reserved });
            }
            Message::Drain => {
                self.stops = true;
                self.waiting.drain(..).for_each(|job| job.end(Told::Stopping));
            }
            Message::End => {}
        }
    }

    /// Frees what nobody waits for. Whose reader has read enough has ended, and not in vain.
    fn let_go(&mut self) {
        let (waiting, gone): (Vec<_>, Vec<_>) = std::mem::take(&mut self.waiting).into_iter().partition(Job::is_wanted);
        self.waiting = waiting.into();
        let mut n_cancelled = gone.iter().filter(|job| !job.has_enough()).count();
        let is_wanted = |sequence: &Sequence| sequence.job.is_wanted();
        let (prefilling, mut gone): (Vec<_>, Vec<_>) =
            std::mem::take(&mut self.prefilling).into_iter().partition(is_wanted);
        let (decoding, more): (Vec<_>, Vec<_>) = std::mem::take(&mut self.decoding).into_iter().partition(is_wanted);
        (self.prefilling, self.decoding) = (prefilling.into(), decoding);
        gone.extend(more);
        n_cancelled += gone.iter().filter(|sequence| !sequence.job.has_enough()).count();
        gone.into_iter().for_each(|sequence| self.remove(sequence.id));
        self.metrics.n_cancelled.add(n_cancelled as u64);
    }

    /// Starts what waits, in order, while there is room.
    fn admit(&mut self) {
        while self.n_running() < self.limits.max_running
            && let Some(job) = self.waiting.pop_front()
        {
            // What it may begin with goes last.
            if let Some(&prefix) = self.prefixes.beginnings(&job.ids).first() {
                self.prefixes.touch(prefix);
            }
            while self.reserved() + job.n_bytes > self.limits.max_cache_bytes && self.drop_prefix() {}
            if self.reserved() + job.n_bytes > self.limits.max_cache_bytes {
                self.waiting.push_front(job);
                return;
            }
            match self.start(&job) {
                Ok((id, n_fed)) => {
                    let (scored, n_new, next, chosen) = (Vec::new(), 0, 0, job.came);
                    self.prefilling.push_back(Sequence {
                        job,
                        id,
                        n_fed,
                        n_reused: n_fed,
                        scored,
                        n_new,
                        next,
                        chosen,
                    });
                }
                Err(error) => job.end(Told::Failed(error.to_string())),
            }
        }
    }

    /// A sequence for a job, empty or with a kept beginning of its prompt; its tokens. Where the prompt's own log probabilities are
    /// asked for it is computed from the start.
    fn start(&mut self, job: &Job) -> Result<(SequenceId, usize), GenerateError> {
        let beginnings = if job.scores_prompt { Vec::new() } else { self.prefixes.beginnings(&job.ids) };
        for prefix in beginnings {
            if let Some(fork) = self.batch.fork(prefix, job.ids.len())? {
                let n_tokens = self.batch.n_tokens(fork)?;
                self.metrics.n_reused_tokens.add(n_tokens as u64);
                return Ok((fork, n_tokens));
            }
        }
        Ok((self.batch.add(job.ids.len())?, 0))
    }

    /// One token more of every answer under way.
    fn decode(&mut self) {
        if self.decoding.is_empty() {
            return;
        }
        let tokens: Vec<_> = self.decoding.iter().map(|sequence| (sequence.id, sequence.next)).collect();
        let logits = self.batch.feed_each(&tokens).and_then(|hidden| self.batch.logits_each(&hidden));
        let decoding = std::mem::take(&mut self.decoding);
        let logits = match logits {
            Ok(logits) => logits,
            Err(error) => {
                let message = error.to_string();
                decoding.into_iter().for_each(|sequence| self.end(sequence, Told::Failed(message.clone())));
                return;
            }
        };
        self.metrics.n_steps.add(1);
        let (ends, metrics) = (&self.ends, &*self.metrics);
        let rows = logits.par_chunks_exact(self.batch.spec().vocab_size);
        let chosen: Vec<_> = decoding
            .into_par_iter()
            .zip(rows)
            .map(|(mut sequence, row)| {
                let finish = sequence.choose(row, ends, metrics);
                (sequence, finish)
            })
            .collect();
        chosen.into_iter().for_each(|(sequence, finish)| self.go_on(sequence, finish));
    }

    /// At most a chunk of prompts: one chunk of each in turn.
    fn prefill(&mut self) {
        let mut left = self.limits.chunk;
        while left > 0
            && let Some(mut sequence) = self.prefilling.pop_front()
        {
            let n_prompt = sequence.job.ids.len();
            let n = self.limits.chunk.min(n_prompt - sequence.n_fed);
            left = left.saturating_sub(n);
            match self.feed(&mut sequence, n) {
                Ok(None) => self.prefilling.push_back(sequence),
                Ok(Some(logits)) => {
                    let (n_reused, scored) = (sequence.n_reused, std::mem::take(&mut sequence.scored));
                    sequence.job.tell(Told::Prompt { n_reused, scored });
                    let finish = match sequence.job.max_new {
                        0 => Some(Finish::Length),
                        _ => sequence.choose(&logits, &self.ends, &self.metrics),
                    };
                    self.go_on(sequence, finish);
                }
                Err(error) => self.end(sequence, Told::Failed(error.to_string())),
            }
        }
    }

    /// The next `n` tokens of a prompt; after the last, the logits of what follows.
    fn feed(&mut self, sequence: &mut Sequence, n: usize) -> Result<Option<Vec<f32>>, GenerateError> {
        let job = &sequence.job;
        let range = sequence.n_fed..sequence.n_fed + n;
        let hidden = self.batch.feed(sequence.id, &job.ids[range.clone()])?;
        if let (true, Some(n_top)) = (job.scores_prompt, job.n_top) {
            let followers = &job.ids[range.start + 1..job.ids.len().min(range.end + 1)];
            sequence.scored.extend(self.scored(&hidden, followers, n_top)?);
        }
        sequence.n_fed = range.end;
        self.metrics.n_prompt_tokens.add(n as u64);
        self.keep_prefix(sequence)?;
        if sequence.n_fed < sequence.job.ids.len() {
            return Ok(None);
        }
        self.batch.logits(&hidden, n - 1..n).map(Some)
    }

    /// What the model says of `followers`, each after its row of `hidden`.
    fn scored(&self, hidden: &Rows, followers: &[u32], n_top: usize) -> Result<Vec<Scored>, GenerateError> {
        let mut scored = Vec::with_capacity(followers.len());
        for (block, ids) in followers.chunks(SCORED_ROWS).enumerate() {
            let first = block * SCORED_ROWS;
            let logits = self.batch.logits(hidden, first..first + ids.len())?;
            let rows = logits.par_chunks_exact(self.batch.spec().vocab_size);
            scored.par_extend(rows.zip(ids).map(|(row, &id)| score(row, id, n_top)));
        }
        Ok(scored)
    }

    /// Keeps what a sequence has of its prompt, if that is worth it and there is room.
    fn keep_prefix(&mut self, sequence: &Sequence) -> Result<(), GenerateError> {
        let (ids, n) = (&sequence.job.ids, sequence.n_fed);
        let is_off = !self.prefixes.is_on() || sequence.job.scores_prompt;
        if is_off || !is_worth_keeping(n, ids.len(), self.limits.chunk) || self.prefixes.has(&ids[..n]) {
            return Ok(());
        }
        let n_bytes = most_bytes(&self.config, n, self.limits.chunk)?;
        // The sequence is in none of the lists just now.
        let running = self.reserved() - self.prefixes.bytes() + sequence.job.n_bytes;
        let left = self.limits.max_cache_bytes.saturating_sub(running);
        if n_bytes > left {
            return Ok(());
        }
        while (self.prefixes.is_full() || self.prefixes.bytes() + n_bytes > left) && self.drop_prefix() {}
        if let Some(fork) = self.batch.fork(sequence.id, ids.len())? {
            self.prefixes.insert(ids[..n].to_vec(), fork, n_bytes);
        }
        Ok(())
    }

    fn drop_prefix(&mut self) -> bool {
        let oldest = self.prefixes.pop_oldest();
        oldest.inspect(|&sequence| self.remove(sequence)).is_some()
    }

    fn go_on(&mut self, sequence: Sequence, finish: Option<Finish>) {
        match finish {
            Some(finish) => self.end(sequence, Told::End(finish)),
            None => self.decoding.push(sequence),
        }
    }

    fn end(&mut self, sequence: Sequence, told: Told) {
        self.remove(sequence.id);
        sequence.job.end(told);
    }

    fn remove(&mut self, sequence: SequenceId) {
        self.batch.remove(sequence).expect("a sequence is removed once, by whoever holds it");
    }
}

impl Sequence {
    /// The next token, from its logits; why it is the last, if it is.
    fn choose(&mut self, logits: &[f32], ends: &BTreeSet<u32>, metrics: &Metrics) -> Option<Finish> {
        let id = self.job.sampler.pick(logits);
        let scored = self.job.n_top.map(|n_top| score(logits, id, n_top));
        let times = if self.n_new == 0 { &metrics.first_token } else { &metrics.next_token };
        times.observe(std::mem::replace(&mut self.chosen, Instant::now()).elapsed());
        self.n_new += 1;
        self.next = id;
        metrics.n_generated_tokens.add(1);
        self.job.tell(Told::Token { id, scored });
        if !self.job.ignores_end && ends.contains(&id) {
            return Some(Finish::Stop);
        }
        (self.n_new == self.job.max_new).then_some(Finish::Length)
    }
}
