//! One layer of one sequence: sink, pages and recent window of every KV head, and Algorithm 2's moves between them. Enters:
//! keys and values in f32. Knows nothing of queries or of other sequences; pages may be shared with forks and are copied
//! before they change.

use std::collections::VecDeque;
use std::sync::Arc;

use crate::plan::{LayerPlan, Pair};
use crate::rows::{Full, Rows};
use crate::threads::for_each_mut;
use crate::{Result, RuntimeError};

/// A page: the same tokens' keys and values of one head.
pub(crate) type Page = Pair<Rows>;

/// One KV head.
#[derive(Debug, Clone)]
pub(crate) struct Head {
    /// The first tokens, at most S_sink.
    pub(crate) sink: Arc<Pair<Full>>,
    /// Tokens after the sink, from `Layer::n_freed` on.
    pub(crate) pages: VecDeque<Arc<Page>>,
    /// Tokens after the pages.
    pub(crate) recent: Pair<Full>,
}

/// One layer of one sequence. Positions `0 .. len` lie, in order, in the sink, in the pages (`n_packed` tokens, the first
/// `n_freed` of them let go) and in the recent window.
#[derive(Debug, Clone)]
pub(crate) struct Layer {
    pub(crate) len: usize,
    pub(crate) n_packed: usize,
    /// A multiple of the page size.
    pub(crate) n_freed: usize,
    pub(crate) heads: Vec<Head>,
}

impl Layer {
    pub(crate) fn new(plan: &LayerPlan) -> Self {
        let full = || Pair::new(Full::new(plan.full), Full::new(plan.full));
        let head = || Head { sink: Arc::new(full()), pages: VecDeque::new(), recent: full() };
        Self {
            len: 0,
            n_packed: 0,
            n_freed: 0,
            heads: std::iter::repeat_with(head).take(plan.config.n_kv_heads).collect(),
        }
    }

    /// Tokens in the sink.
    pub(crate) fn n_sink(&self, plan: &LayerPlan) -> usize {
        self.len.min(plan.windows.sink)
    }

    /// First position held after the sink.
    pub(crate) fn first_held(&self, plan: &LayerPlan) -> usize {
        self.n_sink(plan) + self.n_freed
    }

    /// Line 4: appends `keys` and `values`, `[tokens, n_kv, d]`, in full precision.
    pub(crate) fn append(&mut self, plan: &LayerPlan, keys: &[f32], values: &[f32]) {
        let width = plan.config.kv_width();
        let n_tokens = keys.len() / width;
        let n_to_sink = plan.windows.sink.saturating_sub(self.len).min(n_tokens);
        let [(sink_keys, keys), (sink_values, values)] = [keys, values].map(|x| x.split_at(n_to_sink * width));
        let d = plan.head_dim();
        for (head, state) in self.heads.iter_mut().enumerate() {
            if n_to_sink > 0 {
                let sink = Arc::make_mut(&mut state.sink);
                extend(sink, [sink_keys, sink_values], (head, d, width), plan.windows.sink * d);
            }
            extend(&mut state.recent, [keys, values], (head, d, width), plan.usual_recent());
        }
        self.len += n_tokens;
    }

    /// Lines 7 to 12: quantizes what has left both windows, and lets go of pages that a sliding window has passed.
    pub(crate) fn flush(&mut self, plan: &LayerPlan) -> Result<()> {
        let n = plan.windows.n_to_pack(self.len, self.n_packed);
        if n > 0 {
            let first = self.n_packed - self.n_freed;
            let packed = for_each_mut(&mut self.heads, |head, state| state.pack(plan, head, first, n));
            packed.map_err(|source| RuntimeError::Quant { layer: plan.layer, source })?;
            self.n_packed += n;
        }
        self.free(plan);
        Ok(())
    }

    /// Drops pages of which no query reads a token any more, even after `rewind` tokens were taken back.
    fn free(&mut self, plan: &LayerPlan) {
        let needed = plan.first_visible(self.len.saturating_sub(plan.rewind)).saturating_sub(plan.windows.sink);
        let n_pages = (needed.min(self.n_packed) / plan.page_tokens).saturating_sub(self.n_freed / plan.page_tokens);
        if n_pages > 0 {
            self.heads.iter_mut().for_each(|head| drop(head.pages.drain(..n_pages)));
            self.n_freed += n_pages * plan.page_tokens;
        }
    }

    /// The first position that a query at `len` would miss, if any: what [`Layer::truncate`] cannot give back.
    pub(crate) fn missing_after(&self, plan: &LayerPlan, len: usize) -> Option<usize> {
        let needed = plan.first_visible(len).max(plan.windows.sink).min(len.saturating_sub(1));
        (self.n_freed > 0 && len > plan.windows.sink && needed < self.first_held(plan)).then_some(needed)
    }

    /// Takes back all tokens from `len` on. What was quantized stays so.
    pub(crate) fn truncate(&mut self, plan: &LayerPlan, len: usize) {
        if len >= self.len {
            return;
        }
        let n_sink = len.min(plan.windows.sink);
        self.n_packed = self.n_packed.min(len - n_sink);
        // Either all that was let go is still behind, or nothing after the sink is left, see `missing_after`.
        self.n_freed = self.n_freed.min(self.n_packed);
        let n_pages = (self.n_packed - self.n_freed).div_ceil(plan.page_tokens);
        let d = plan.head_dim();
        for head in &mut self.heads {
            if n_sink < plan.windows.sink && head.sink.keys.len() > n_sink * d {
                Arc::make_mut(&mut head.sink).each_mut().into_iter().for_each(|rows| rows.truncate(n_sink * d));
            }
            head.pages.truncate(n_pages);
            head.recent.each_mut().into_iter().for_each(|rows| rows.truncate((len - n_sink - self.n_packed) * d));
        }
        self.len = len;
    }
}

/// Appends head `head`'s rows of `[tokens, n_kv, d]` to both sides; `usual` is how many elements they grow to without haste.
fn extend(pair: &mut Pair<Full>, x: [&[f32]; 2], (head, d, width): (usize, usize, usize), usual: usize) {
    for (rows, x) in pair.each_mut().into_iter().zip(x) {
        rows.reserve(x.len() / width * d, usual);
        x.chunks_exact(width).for_each(|token| rows.extend(&token[head * d..][..d]));
    }
}

impl Head {
    /// Moves `n` tokens from the front of the recent window of head `index` to its pages, which hold `first` tokens.
    fn pack(&mut self, plan: &LayerPlan, index: usize, first: usize, n: usize) -> wush_quant::Result<()> {
        let d = plan.head_dim();
        let mut scratch = Vec::new();
        let mut done = 0;
        while done < n {
            let held = first + done;
            let at = held % plan.page_tokens;
            let take = (plan.page_tokens - at).min(n - done);
            let page = page_to_fill(&mut self.pages, plan, held / plan.page_tokens, at);
            for (((rows, store), feedback), recent) in
                page.each_mut().into_iter().zip(plan.stores.each()).zip(plan.feedback.each()).zip(self.recent.each())
            {
                let feedback = feedback.as_ref().map(|of_heads| &of_heads[index]);
                rows.encode(store, feedback, recent.read(done * d..(done + take) * d, &mut scratch))?;
            }
            done += take;
        }
        self.recent.each_mut().into_iter().for_each(|rows| rows.drop_front(n * d, plan.usual_recent()));
        Ok(())
    }
}

/// Page `index` with exactly `n_tokens`, no fork's but this head's own.
fn page_to_fill<'a>(
    pages: &'a mut VecDeque<Arc<Page>>,
    plan: &LayerPlan,
    index: usize,
    n_tokens: usize,
) -> &'a mut Page {
    let d = plan.head_dim();
    if index == pages.len() {
        let [keys, values] = plan.stores.each().map(|store| Rows::empty(store, d, plan.page_tokens));
        pages.push_back(Arc::new(Pair::new(keys, values)));
    }
    let page = &mut pages[index];
    if Arc::get_mut(page).is_none() {
        let copy = |rows: &Rows, store| rows.copy_of(store, d, n_tokens, plan.page_tokens);
        *page = Arc::new(Pair::new(copy(&page.keys, &plan.stores.keys), copy(&page.values, &plan.stores.values)));
    }
    let page = Arc::get_mut(page).expect("no one else holds a page that was just made or found alone");
    // A truncated sequence leaves rows in its last page.
    for (rows, store) in page.each_mut().into_iter().zip(plan.stores.each()) {
        rows.truncate(store, d, n_tokens);
    }
    page
}
