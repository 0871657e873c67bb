//! What a cache holds, in bytes: exact, from the buffers themselves.

use std::collections::BTreeSet;
use std::sync::Arc;

use crate::KvCache;
use crate::layer::{Head, Layer, Page};
use crate::plan::Pair;
use crate::rows::Full;

/// Bytes allocated by a cache, by kind. A page or sink that forks share counts once.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Memory {
    /// Pages' keys: packed, or in full precision at 16 bits. Pages are allocated whole.
    pub page_keys: usize,
    /// Pages' values.
    pub page_values: usize,
    /// Keys of sinks and recent windows.
    pub window_keys: usize,
    /// Values of sinks and recent windows.
    pub window_values: usize,
    /// Everything else that grows with sequences and pages: headers of buffers and lists of pages.
    pub index: usize,
}

impl Memory {
    /// All of it.
    pub fn total(&self) -> usize {
        self.page_keys + self.page_values + self.window_keys + self.window_values + self.index
    }
}

/// Two counters before the content of every `Arc`.
const ARC_COUNTERS: usize = 2 * size_of::<usize>();

impl KvCache {
    /// Bytes allocated for sequences.
    pub fn memory(&self) -> Memory {
        let mut memory = Memory::default();
        let mut seen = BTreeSet::new();
        for layers in self.sequences.values() {
            memory.index += layers.capacity() * size_of::<Layer>();
            for layer in layers {
                memory.index += layer.heads.capacity() * size_of::<Head>();
                layer.heads.iter().for_each(|head| memory.add(head, &mut seen));
            }
        }
        memory
    }
}

impl Memory {
    fn add(&mut self, head: &Head, seen: &mut BTreeSet<usize>) {
        self.add_window(&head.recent);
        if seen.insert(Arc::as_ptr(&head.sink).addr()) {
            self.index += size_of::<Pair<Full>>() + ARC_COUNTERS;
            self.add_window(&head.sink);
        }
        self.index += head.pages.capacity() * size_of::<Arc<Page>>();
        for page in &head.pages {
            if seen.insert(Arc::as_ptr(page).addr()) {
                self.index += size_of::<Page>() + ARC_COUNTERS;
                self.page_keys += page.keys.bytes();
                self.page_values += page.values.bytes();
            }
        }
    }

    fn add_window(&mut self, window: &Pair<Full>) {
        self.window_keys += window.keys.bytes();
        self.window_values += window.values.bytes();
    }
}
